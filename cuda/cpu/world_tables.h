// Parts of a World that a host computes, identical for the CPU engine and for CUDA ranks: tables of the placement and of
// the nodes, and the mark of its plans.
#pragma once

#include <algorithm>
#include <random>
#include <vector>

#include "../protocol/core/layout.h"

namespace moe_rt {

// Tables of a placement, computed from the rank of each expert.
struct PlacementTables {
  std::vector<int32_t> position, owner, rank_first, entries;

  static PlacementTables make(const std::vector<int32_t>& expert_rank, int num_ranks) {
    PlacementTables t;
    const int num_experts = static_cast<int>(expert_rank.size());
    for (int r = 0; r < num_ranks; ++r) {
      t.rank_first.push_back(static_cast<int32_t>(t.owner.size()));
      for (int e = 0; e < num_experts; ++e) {
        if (expert_rank[e] == r) t.owner.push_back(r);
      }
    }
    t.rank_first.push_back(static_cast<int32_t>(t.owner.size()));
    std::vector<int32_t> next(t.rank_first.begin(), t.rank_first.end() - 1);
    for (int e = 0; e < num_experts; ++e) t.position.push_back(next[expert_rank[e]]++);
    for (const int32_t place : t.position) t.entries.push_back(int32_t(uint32_t(t.owner[place]) << 16 | place));
    return t;
  }
  Placement view() const { return {position.data(), owner.data(), rank_first.data(), entries.data()}; }
};

// Tables of proxies and clients between nodes, computed from the node of each rank.
class NodeTables {
 public:
  // `node_of` is the node of each rank; empty in flat mode.
  NodeTables(const std::vector<int32_t>& node_of, int rank)
      : rank_(rank),
        node_of_(node_of),
        proxy_of_(node_of.size()),
        client_index_(node_of.size()),
        proxy_on_(node_of.size()) {
    const int num_ranks = static_cast<int>(node_of.size());
    if (num_ranks == 0) return;
    ranks_.resize(*std::max_element(node_of.begin(), node_of.end()) + 1);
    for (int r = 0; r < num_ranks; ++r) ranks_[node_of[r]].push_back(r);
    std::vector<int32_t> num_clients(num_ranks);
    for (int r = 0; r < num_ranks; ++r) {
      proxy_of_[r] = proxy_of(own(), r), proxy_on_[r] = node_of[r] == own() ? r : proxy_of(node_of[r], rank);
      if (node_of[r] == own()) continue;
      client_index_[r] = num_clients[proxy_of_[r]]++;
      if (proxy_of_[r] == rank) clients_.push_back(r);
    }
  }

  // Returns the shape of a group on those nodes: every rank's segment has capacity for the maximum number of clients.
  static Shape sized(Shape shape, const std::vector<int32_t>& node_of) {
    for (size_t r = 0; r < node_of.size(); ++r) {
      const NodeTables tables(node_of, static_cast<int>(r));
      shape.num_nodes = tables.num_nodes();
      shape.most_node_ranks = max_of(shape.most_node_ranks, static_cast<int32_t>(tables.neighbours().size()));
      shape.num_clients = max_of(shape.num_clients, static_cast<int32_t>(tables.clients().size()));
    }
    return shape;
  }

  int own() const { return node_of_[rank_]; }
  int num_nodes() const { return static_cast<int>(ranks_.size()); }
  const std::vector<int32_t>& neighbours() const { return ranks_[own()]; }  // includes this rank
  const std::vector<int32_t>& clients() const { return clients_; }
  const std::vector<int32_t>& proxies() const { return proxy_of_; }
  const std::vector<int32_t>& client_index() const { return client_index_; }
  const std::vector<int32_t>& proxy_on() const { return proxy_on_; }

  // Returns a rank's proxy on `node`, chosen by the rank's index on its own node, so that all nodes' work is spread
  // alike. A rank of the node itself is its own proxy.
  int proxy_of(int node, int rank) const {
    if (node_of_[rank] == node) return rank;
    const std::vector<int32_t>& home = ranks_[node_of_[rank]];
    const auto place = std::find(home.begin(), home.end(), rank) - home.begin();
    return ranks_[node][place % ranks_[node].size()];
  }

  Nodes view() const {
    return {own(),           int32_t(clients_.size()), node_of_.data(), proxy_of_.data(), client_index_.data(),
            clients_.data(), proxy_on_.data()};
  }

 private:
  int rank_;
  std::vector<int32_t> node_of_, proxy_of_, client_index_, clients_, proxy_on_;
  std::vector<std::vector<int32_t>> ranks_;  // ranks of each node
};

// Mark that distinguishes one engine's plans from those of all other engines, also in other processes, and from memory
// that is no plan.
inline uint64_t new_plan_mark() {
  std::random_device random;
  return uint64_t{random()} << 32 | random();
}

}  // namespace moe_rt
