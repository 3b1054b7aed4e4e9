// Reader of unknown segments: the header is copied and validated first, then the data at its offsets is read.
#include "report.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "../protocol/two_level/link.h"
#include "recording.h"
#include "world_tables.h"

namespace moe_rt {

namespace {

constexpr int32_t kMostRanks = 1 << 15;  // fits the poison word
constexpr int kLooks = 1000;             // attempts to read a changing slot; writing one takes far less time

void expect(bool condition, const char* what, int64_t got, const std::string& expected) {
  if (condition) return;
  throw std::invalid_argument(std::string(what) + ": got " + std::to_string(got) + ", expected " + expected);
}

// Pairs with write_segment_header.
SegmentHeader read_segment_header(const char* segment, int64_t num_bytes) {
  expect(num_bytes >= int64_t{sizeof(SegmentHeader)}, "bytes", num_bytes, "a segment header");
  const auto past_line = static_cast<int64_t>(reinterpret_cast<uintptr_t>(segment) % kLinePair);
  expect(past_line == 0, "start", past_line, "0 bytes past the start of a line");
  const auto& mapped = *reinterpret_cast<const SegmentHeader*>(segment);
  expect(load_acquire(mapped.magic) == kSegmentHeaderMagic, "magic", int64_t(load_relaxed(mapped.magic)),
         "a segment header");
  const SegmentHeader p = read_once(mapped);
  expect(p.version == kSegmentHeaderVersion, "version", p.version, std::to_string(kSegmentHeaderVersion));
  expect(p.num_ranks > 0 && p.num_ranks < kMostRanks, "ranks", p.num_ranks, "1 to " + std::to_string(kMostRanks - 1));
  expect(p.rank >= 0 && p.rank < p.num_ranks, "rank", p.rank, "one of " + std::to_string(p.num_ranks));
  const auto fits = [num_bytes](const char* what, int64_t at, int64_t size) {
    const bool inside = size <= num_bytes && at >= 0 && at <= num_bytes - size && at % kLinePair == 0;
    expect(inside, what, at,
           "a line that begins " + std::to_string(size) + " of " + std::to_string(num_bytes) + " bytes");
  };
  fits("poison", p.poison, sizeof(uint64_t));
  fits("members", p.members, int64_t{p.num_ranks} * sizeof(Member));
  const int64_t channel_bytes = int64_t{kNumKinds} * p.num_ranks * int64_t{sizeof(Mailbox)};
  fits("mailboxes", p.mailboxes, channel_bytes);
  const int64_t bytes = p.members - p.mailboxes;  // members follow the mailboxes of all channels
  expect(bytes >= channel_bytes && bytes % channel_bytes == 0, "mailboxes", bytes,
         "a multiple of " + std::to_string(channel_bytes) + " bytes");
  fits("op_records", p.op_records, int64_t{kNumOpRecords} * sizeof(OpRecordSlot));
  fits("last words", p.last_words, sizeof(LastWords));
  return p;
}

// Finds the announcers and clients of the segment's rank, if rows go in two levels and its node numbers are possible.
void find_proxies(SegmentReport& report) {
  const SegmentHeader& p = report.header;
  std::vector<int32_t> node_of;
  for (const Member& member : report.members) {
    if (p.num_nodes > 1 && below(member.node, p.num_ranks)) node_of.push_back(member.node);
  }
  if (node_of.size() != report.members.size()) node_of.clear();
  const NodeTables tables(node_of, p.rank);
  report.clients = tables.clients();
  World of_its_nodes{};  // the only fields that announcer_of reads
  of_its_nodes.rank = p.rank;
  if (!node_of.empty()) of_its_nodes.nodes = tables.view();
  for (const Kind kind : {Kind::kDispatch, Kind::kCombine}) {
    for (int r = 0; r < p.num_ranks; ++r) {
      report.announcers[static_cast<int>(kind)].push_back(announcer_of(of_its_nodes, kind, r));
    }
  }
}

}  // namespace

SegmentReport read_segment(const char* segment, int64_t num_bytes) {
  SegmentReport report{};
  const SegmentHeader& p = report.header = read_segment_header(segment, num_bytes);
  report.poison = load_relaxed(*reinterpret_cast<const uint64_t*>(segment + p.poison));

  const auto* mailboxes = reinterpret_cast<const Mailbox*>(segment + p.mailboxes);
  report.closed_to.resize(p.num_ranks);
  for (auto& of_kind : report.announced) of_kind.resize(p.num_ranks);
  const int64_t num_mailboxes = (p.members - p.mailboxes) / int64_t{sizeof(Mailbox)};
  for (int64_t i = 0; i < num_mailboxes; ++i) {  // of every channel
    report.announced[i / p.num_ranks % kNumKinds][i % p.num_ranks] += load_relaxed(mailboxes[i].signal);
    if (load_relaxed(mailboxes[i].closed) != 0) report.closed_to[i % p.num_ranks] = true;
  }
  const auto* members = reinterpret_cast<const Member*>(segment + p.members);
  report.members.assign(members, members + p.num_ranks);
  find_proxies(report);

  report.last_words = read_last_words(*reinterpret_cast<const LastWords*>(segment + p.last_words));
  const auto* slots = reinterpret_cast<const OpRecordSlot*>(segment + p.op_records);
  for (int i = 0; i < kNumOpRecords; ++i) {
    OpRecord op_record;
    bool whole = false;
    for (int look = 0; look < kLooks && !whole; ++look) whole = read_op_record(slots[i], op_record);
    if (!whole) {
      ++report.num_torn;
    } else if (op_record.number != 0) {
      report.op_records.push_back(op_record);
    }
  }
  std::sort(report.op_records.begin(), report.op_records.end(),
            [](const OpRecord& a, const OpRecord& b) { return a.number < b.number; });
  return report;
}

}  // namespace moe_rt
