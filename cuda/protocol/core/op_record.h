// Diagnostic records that a rank keeps in its own segment, for finding out why a group hangs: a segment header that
// identifies the memory, the ranks' processes, a ring of the rank's last ops, and why it left. The engine updates the
// ring at each step of an op (cpu/recording.h).
//
// Only the owner writes. Any process that maps the segment may read, also when the owner hangs, is stopped or is dead.
// The ring of a CUDA rank stays empty: its host does not see when its ops run.
#pragma once

#include "status.h"

namespace moe_rt {

inline constexpr uint64_t kSegmentHeaderMagic = 0x31'74'72'5f'65'6f'6d'00;  // reads "\0moe_rt1"
inline constexpr uint32_t kSegmentHeaderVersion = 3;
inline constexpr int kNumOpRecords = 64;

// First bytes of a segment: a reader needs no other information. Offsets are those of Layout.
struct SegmentHeader {
  uint64_t magic;  // written last
  uint32_t version;
  int32_t rank, pid;
  int32_t num_ranks, num_experts, num_max_tokens, hidden, num_topk, elem_bytes, acc_bytes;  // fields of Shape
  uint64_t config;
  int64_t poison, mailboxes, members, op_records, bytes, last_words;  // offsets in bytes; size of the segment
  int64_t num_nodes;                                                  // field of Shape
};
static_assert(sizeof(SegmentHeader) == 112, "readers of other builds know these bytes by the version alone");

// A rank's process, its node, and the inode of its segment's file, found among the descriptors of all ranks; 0 if the
// segment is no file.
struct Member {
  int32_t pid, node;
  uint64_t inode;
};
static_assert(sizeof(Member) == 16, "readers of other builds know these bytes");

// One op, from its first step on. Times are nanoseconds of CLOCK_MONOTONIC, 0 until the step is over.
struct OpRecord {
  uint64_t number = 0;  // counts all ops of this rank, from 1; it is in slot number % kNumOpRecords
  uint64_t seq = 0;     // counts the ops of its kind
  Op op = Op::kNone;
  Code code = Code::kOk;
  uint32_t tag = 0;  // number of the layer
  int32_t num_tokens = 0;
  int64_t start_ns = 0, announced_ns = 0, arrived_ns = 0, end_ns = 0;  // arrived_ns: all peers' signals have arrived
  int64_t longest_ns = 0;  // longest wait for a single peer; peers are awaited in rank order
  int64_t longest_peer = -1;
  uint64_t handle_seq = 0;  // seq of the dispatch whose handle is used; 0 for a dispatch
};
inline constexpr int kOpRecordWords = sizeof(OpRecord) / sizeof(uint64_t);

struct alignas(128) OpRecordSlot {
  uint64_t stamp;  // odd while the words change
  uint64_t words[kOpRecordWords];
};
static_assert(sizeof(OpRecord) == 88 && sizeof(OpRecordSlot) == 128, "readers of other builds know these bytes");

// Text that says why the rank left the group: UTF-8, for people. Written once, before the poison word or the closed
// flag that announces the departure to peers.
struct alignas(128) LastWords {
  uint64_t num_bytes;  // bytes of `text`, written last; 0 while empty
  char text[504];
};

}  // namespace moe_rt
