// Tables of proxies and clients between nodes, computed from the node of each rank.
#pragma once

#include <algorithm>
#include <vector>

#include "../protocol/core/layout.h"

namespace moe_rt {

class NodeTables {
 public:
  // `node_of` is the node of each rank; empty in flat mode.
  NodeTables(const std::vector<int32_t>& node_of, int rank)
      : rank_(rank),
        node_of_(node_of),
        forwarder_(node_of.size()),
        served_at_(node_of.size()),
        serving_(node_of.size()) {
    const int num_ranks = static_cast<int>(node_of.size());
    if (num_ranks == 0) return;
    ranks_.resize(*std::max_element(node_of.begin(), node_of.end()) + 1);
    for (int r = 0; r < num_ranks; ++r) ranks_[node_of[r]].push_back(r);
    std::vector<int32_t> num_served(num_ranks);
    for (int r = 0; r < num_ranks; ++r) {
      forwarder_[r] = forwarder(own(), r), serving_[r] = node_of[r] == own() ? r : forwarder(node_of[r], rank);
      if (node_of[r] == own()) continue;
      served_at_[r] = num_served[forwarder_[r]]++;
      if (forwarder_[r] == rank) served_.push_back(r);
    }
  }

  // Returns the shape of a group on those nodes: every rank's segment has capacity for the maximum number of clients.
  static Shape sized(Shape shape, const std::vector<int32_t>& node_of) {
    for (size_t r = 0; r < node_of.size(); ++r) {
      const NodeTables tables(node_of, static_cast<int>(r));
      shape.num_nodes = tables.num_nodes();
      shape.most_node_ranks = larger(shape.most_node_ranks, static_cast<int32_t>(tables.neighbours().size()));
      shape.num_served = larger(shape.num_served, static_cast<int32_t>(tables.served().size()));
    }
    return shape;
  }

  int own() const { return node_of_[rank_]; }
  int num_nodes() const { return static_cast<int>(ranks_.size()); }
  const std::vector<int32_t>& neighbours() const { return ranks_[own()]; }  // includes this rank
  const std::vector<int32_t>& served() const { return served_; }
  const std::vector<int32_t>& forwarders() const { return forwarder_; }
  const std::vector<int32_t>& served_at() const { return served_at_; }
  const std::vector<int32_t>& serving() const { return serving_; }

  // Returns a rank's proxy on `node`, chosen by the rank's index on its own node, so that all nodes' work is spread
  // alike. A rank of the node itself is its own proxy.
  int forwarder(int node, int rank) const {
    if (node_of_[rank] == node) return rank;
    const std::vector<int32_t>& home = ranks_[node_of_[rank]];
    const auto place = std::find(home.begin(), home.end(), rank) - home.begin();
    return ranks_[node][place % ranks_[node].size()];
  }

  Nodes view() const {
    return {own(),          int32_t(served_.size()), node_of_.data(), forwarder_.data(), served_at_.data(),
            served_.data(), serving_.data()};
  }

 private:
  int rank_;
  std::vector<int32_t> node_of_, forwarder_, served_at_, served_, serving_;
  std::vector<std::vector<int32_t>> ranks_;  // ranks of each node
};

}  // namespace moe_rt
