// Tests that no two regions of a segment overlap and that each is inside it: the memory of every address that roles
// compute, for groups with and without nodes, of any depth, with either order of sums, pushed or not. The same for the
// private memory in which a rank keeps data of unmapped peers, and for the memory of a GPU's network.
//
// It exits with 0 if all is right; otherwise it prints the regions that are not.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "../../cuda/cpu/proxy.h"
#include "../../cuda/cpu/world_tables.h"
#include "../../cuda/gpu/sizes.h"
#include "../../cuda/net/mapped_network.h"
#include "../../cuda/net/remote_peers.h"
#include "../../cuda/protocol/flat/combine_entries.h"

using namespace moe_rt;

namespace {

int num_wrong = 0;

// Named byte ranges of one memory.
class Regions {
 public:
  Regions(std::string memory, const void* start, int64_t bytes)
      : memory_(std::move(memory)), start_(uintptr_t(start)), bytes_(bytes) {}
  void add(std::string name, const void* first, int64_t bytes) { all_.push_back({uintptr_t(first), bytes, name}); }
  // Adds everything from the first byte of one place to the last of another.
  void add(std::string name, const void* first, const void* last, int64_t bytes_of_last) {
    add(std::move(name), first, static_cast<const char*>(last) - static_cast<const char*>(first) + bytes_of_last);
  }
  void judge() {
    std::sort(all_.begin(), all_.end(), [](const Region& a, const Region& b) { return a.first < b.first; });
    uintptr_t end = start_;
    std::string before = "the start";
    for (const Region& r : all_) {
      if (r.bytes == 0) continue;
      if (r.first < end || r.first + r.bytes > start_ + bytes_) {
        ++num_wrong;
        std::printf("%s: %s, bytes %td to %td, after %s, which ends at %td of %td\n", memory_.c_str(), r.name.c_str(),
                    r.first - start_, r.first + r.bytes - start_, before.c_str(), end - start_, ptrdiff_t(bytes_));
      }
      end = std::max(end, r.first + r.bytes), before = r.name;
    }
  }

 private:
  struct Region {
    uintptr_t first;
    int64_t bytes;
    std::string name;
  };
  std::string memory_;
  uintptr_t start_;
  int64_t bytes_;
  std::vector<Region> all_;
};

std::string numbered(const char* name, int64_t number) { return std::string(name) + " " + std::to_string(number); }

template <class Weight>
struct Case {
  Shape s;
  std::vector<int32_t> node_of;
  std::string name;
  int64_t last = s.num_max_tokens - 1;

  int64_t returned_bytes() const {
    const int64_t bytes = int64_t{s.hidden} * s.elem_bytes;
    return s.returns_entries() ? entry_bytes<Weight>(bytes) : bytes;
  }

  void add_lists(Regions& to, const std::string& of, const RouteLists<Weight>& lists, int64_t tokens) const {
    to.add(of + " counts", lists.counts.start, int64_t{4} * s.num_experts);
    to.add(of + " pull_offs", lists.pull_offs.start, int64_t{4} * (s.num_ranks + 1));
    to.add(of + " copy_offs", lists.copy_offs.start, int64_t{4} * (s.num_ranks + 1));
    to.add(of + " pulls", lists.pulls.start, tokens * s.num_visits() * int64_t{sizeof(Pull)});
    to.add(of + " copies", lists.copies.start, tokens * s.num_topk * int64_t{sizeof(Copy)});
    to.add(of + " weights", lists.weights.start, tokens * s.num_topk * int64_t{sizeof(Weight)});
  }

  // The rows and scalars that a link accesses at the places where they return to `owner`.
  template <class Row, class Scalar>
  void add_returned(Regions& to, const std::string& of, const World& w, int window, int slots, Row&& row,
                    Scalar&& scalar) const {
    if (s.returns_entries()) {
      to.add(of + " entries", row(w.entry_row(window, 0, 0)), row(w.entry_row(window, last, s.num_topk - 1)),
             returned_bytes());
      return;
    }
    to.add(of + " partials", row(w.partial_row(window, 0, 0)), row(w.partial_row(window, last, slots - 1)),
           returned_bytes());
    to.add(of + " scalars", scalar(w.scalar(window, 0, 0)), scalar(w.scalar(window, last, s.num_topk - 1)),
           sizeof(Weight));
  }

  void add_window(Regions& to, const World& w, int window) const {
    const std::string of = numbered("channel", w.layout.channel) + numbered(", window", window) + ",";
    const auto at = [&](int64_t offset) { return w.at<char>(w.rank, offset); };
    add_lists(to, of, RouteLists<Weight>::view(w, w.rank, window), s.num_max_tokens);
    to.add(of + " tokens", at(w.token_row(window, 0)), at(w.token_row(window, last)), s.row_bytes());
    add_returned(to, of, w, window, s.num_slots(), at, at);
    for (int i = 0; i + 1 < s.num_nodes && !s.returns_entries(); ++i) {
      to.add(of + numbered(" scalars of node", i), at(w.remote_scalar(window, 0, 0, i)),
             at(w.remote_scalar(window, last, s.num_topk - 1, i)), sizeof(Weight));
    }
    for (int r = 0; r < s.num_ranks && s.num_pushed_tokens > 0; ++r) {
      const std::string by = of + numbered(" pushed by rank", r) + ",";
      add_lists(to, by, RouteLists<Weight>::pushed(w, w.base[w.rank], r, window), s.num_pushed_tokens);
      to.add(by + " rows", at(w.pushed_row(window, r, 0)), at(w.pushed_row(window, r, s.num_pushed_rows - 1)),
             s.num_pushed_rows > 0 ? s.row_bytes() : 0);
    }
    for (int i = 0; i < w.nodes.num_clients; ++i) add_client(to, of, w, window, w.nodes.clients[i]);
  }

  // The places of a client's data in its proxy's segment.
  void add_client(Regions& to, const std::string& of, const World& w, int window, int client) const {
    const NodeLink link{window};
    const std::string by = of + numbered(" client", client) + ",";
    const auto row = [&](int64_t offset) { return link.target_row(w, client, offset); };
    const auto scalar = [&](int64_t offset) {  // its place is known only from a write
      char* const segment = w.base[w.rank];
      std::memset(segment, 0, w.layout.bytes);
      link.put(w, client, offset, Weight(1));
      return static_cast<const char*>(std::find_if(segment, segment + w.layout.bytes, [](char c) { return c != 0; })) -
             (sizeof(Weight) - 2);  // only the two upper bytes of 1.0 are not zero
    };
    add_returned(to, by + " forwarded", w, window, s.num_node_slots(), row, scalar);
    if (window != 0) return;  // both windows are staged in one place
    add_lists(to, by + " staged", RouteLists<Weight>::view(w, client, window), s.num_max_tokens);
    const auto staged = [&](int64_t token) {
      return link.source_row(w, client, w.token_row(window, token), s.row_bytes());
    };
    to.add(by + " staged rows", staged(0), staged(last), s.row_bytes());
  }

  // The segment of a rank, as the rank and its neighbours address it.
  void check_segment(int rank) const {
    const int64_t bytes = Layout::make(s).bytes;
    const std::unique_ptr<char[]> memory(new char[bytes + kPage]());
    char* const segment = memory.get() + kPage - reinterpret_cast<uintptr_t>(memory.get()) % kPage;
    Regions regions(name + numbered(", rank", rank), segment, bytes);
    const NodeTables tables(node_of, rank);
    std::vector<char*> base(s.num_ranks, nullptr);
    base[rank] = segment;
    MappedNetwork network(std::vector<uint64_t>(s.num_ranks), s, rank);
    for (int channel = 0; channel < s.depth; ++channel) {
      World w{};
      w.shape = s, w.layout = Layout::of_channel(s, channel), w.base = base.data(), w.rank = rank;
      const std::unique_ptr<Proxy> proxy = with_nodes(w, tables, network);
      for (const Kind kind : {Kind::kDispatch, Kind::kCombine}) {
        regions.add(numbered("mailboxes of channel", channel), &w.mailbox(rank, kind, 0),
                    s.num_ranks * int64_t{sizeof(Mailbox)});
      }
      for (int window = 0; window < 2; ++window) add_window(regions, w, window);
      if (channel == 0) add_control(regions, w);
    }
    regions.judge();
  }
  std::unique_ptr<Proxy> with_nodes(World& w, const NodeTables& tables, Network& network) const {
    if (node_of.empty()) return nullptr;
    w.nodes = tables.view();
    auto proxy = std::make_unique<Proxy>(w, tables, network);
    w.mirror = proxy->lists();
    return proxy;
  }
  void add_control(Regions& to, const World& w) const {
    to.add("segment header", w.base[w.rank], sizeof(SegmentHeader));
    to.add("poison", &w.poison(w.rank), sizeof(uint64_t));
    to.add("members", w.at<char>(w.rank, w.layout.members), s.num_ranks * int64_t{sizeof(Member)});
    for (int i = 0; i < kNumOpRecords; ++i) to.add("op record", &w.op_record(i), sizeof(OpRecordSlot));
    to.add("last words", w.at<char>(w.rank, w.layout.last_words), sizeof(LastWords));
  }

  // Private copies of unmapped peers' data.
  void check_remote_peers() const {
    World w{};
    std::vector<char*> base(s.num_ranks, nullptr);
    w.shape = s, w.layout = Layout::make(s), w.base = base.data();
    MappedNetwork network(std::vector<uint64_t>(s.num_ranks), s, 0);
    const RemotePeers peers(s, w.layout, base, network);
    w.mirror = peers.mirrors();
    Regions regions(name + ", unmapped peers", peers.mirrors()[0], INT64_MAX / 2);
    for (int r = 0; r < s.num_ranks; ++r) {
      const RemoteLink link{peers, 0};
      const std::string of = numbered("rank", r);
      add_lists(regions, of, RouteLists<Weight>::view(w, r, 0), s.num_max_tokens);
      const auto token = [&](int64_t t) { return link.source_row(w, r, w.token_row(0, t), s.row_bytes()); };
      // Rows to be put take the place of rows that were fetched: an op needs one of the two.
      const bool entries = s.returns_entries();
      const char* const to = link.target_row(
          w, r, entries ? w.entry_row(0, last, s.num_topk - 1) : w.partial_row(0, last, s.num_slots() - 1));
      const int64_t apart = to - link.target_row(w, r, w.entry_row(0, 0, 0));
      if (entries && apart != w.entry_row(0, last, s.num_topk - 1) - w.entry_row(0, 0, 0)) {
        ++num_wrong;
        std::printf("%s: entries of %s share places\n", name.c_str(), of.c_str());
      }
      const char* const end = std::max(to + returned_bytes(), token(last) + s.row_bytes());
      regions.add(of + " rows", token(0), end - token(0));
      const auto scalar = [&](int64_t t, int64_t k) {
        return peers.scalar(r, w.scalar(0, t, k), w.layout.window[0].scalars);
      };
      if (!entries) regions.add(of + " scalars", scalar(0, 0), scalar(last, s.num_topk - 1), sizeof(Weight));
    }
    regions.judge();
  }

  // Symmetric memory of a GPU's network.
  void check_network_memory() const {
    constexpr int kWarps = 5;
    const NetworkLayout n = NetworkLayout::make(s, kWarps);
    char* const start = reinterpret_cast<char*>(kPage);
    Regions regions(name + ", network of a GPU", start, n.bytes);
    regions.add("headers", start, int64_t{kNumKinds} * s.num_ranks * 2 * int64_t{sizeof(Header)});
    const NetworkMemory memory{nullptr, nullptr, start + n.staging, n.warp_bytes};
    for (int warp = 0; warp < kWarps; ++warp) {
      const int64_t bytes =
          s.two_level() ? s.row_bytes() + returned_bytes() : std::max(s.row_bytes(), returned_bytes());
      regions.add(numbered("rows of warp", warp), memory.scratch_of(warp),
                  s.two_level() && s.returns_entries() ? s.row_bytes() : bytes);
    }
    const Layout::Window& o = Layout::make(s).window[0];
    for (int r = 0; r < s.num_ranks && !s.two_level(); ++r) {
      regions.add(numbered("lists of rank", r), start + n.mirrors + r * n.mirror_bytes,
                  o.weights - o.counts + int64_t{s.num_max_tokens} * s.num_topk * int64_t{sizeof(Weight)});
    }
    regions.judge();
  }

  void check() const {
    for (int rank = 0; rank < s.num_ranks; ++rank) check_segment(rank);
    check_network_memory();
    if (node_of.empty()) check_remote_peers();
  }
};

void check(Shape shape, const std::vector<int32_t>& node_of, const std::string& nodes) {
  shape = NodeTables::sized(shape, node_of);
  const std::string name = nodes + ": T " + std::to_string(shape.num_max_tokens) + numbered(", H", shape.hidden) +
                           numbered(", K", shape.num_topk) + numbered(", bytes", shape.elem_bytes) +
                           numbered(", sums", int64_t(shape.sums)) + numbered(", depth", shape.depth);
  if (shape.acc_bytes == 8) {
    Case<double>{shape, node_of, name}.check();
  } else {
    Case<float>{shape, node_of, name}.check();
  }
}

}  // namespace

int main() {
  const std::vector<std::pair<std::string, std::vector<int32_t>>> groups = {
      {"flat", {}}, {"2+2", {0, 0, 1, 1}}, {"1+1+1", {0, 1, 2}}, {"1+3", {0, 1, 1, 1}}, {"3+1+2", {0, 0, 0, 1, 2, 2}}};
  for (const auto& [name, node_of] : groups) {
    for (const int tokens : {1, 70}) {
      for (const int topk : {1, 5, 33}) {
        for (const auto& [hidden, elem_bytes] : {std::pair{1, 2}, {64, 2}, {16, 4}, {8, 8}}) {
          for (const Sums sums : {Sums::kRanked, Sums::kInvariant}) {
            Shape s{.num_ranks = node_of.empty() ? 3 : int32_t(node_of.size()),
                    .num_experts = 9,
                    .num_max_tokens = tokens,
                    .hidden = hidden,
                    .num_topk = topk,
                    .elem_bytes = elem_bytes,
                    .acc_bytes = elem_bytes == 8 ? 8 : 4};
            s.sums = sums, s.depth = 1 + topk % 3;
            check(s, node_of, name);
            if (!node_of.empty()) continue;
            s.num_pushed_tokens = std::min(tokens, 9), s.num_pushed_rows = std::min(tokens, 4);
            check(s, node_of, name + ", pushed");
          }
        }
      }
    }
  }
  return num_wrong > 0;
}
