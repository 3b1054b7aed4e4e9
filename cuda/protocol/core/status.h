// Result of an op: a code, and a record of which rank waited for which peer, where, and what it saw. Every op of the
// CPU engine returns one; CUDA kernels write a failure's to host memory.
#pragma once

#include "platform.h"

namespace moe_rt {

// Values are part of the protocol (they travel in headers) and of moe_rt/errors.py.
enum class Code : int32_t {
  kOk = 0,
  // Refusals: every rank sees the same one in the same op, and the buffer stays usable.
  kInvalidInput = 1,
  kInvalidRouting = 2,
  kTooManyTokens = 3,
  kCapacityOverflow = 4,
  // Failures: the group is poisoned and every later op raises.
  kConfigMismatch = 16,
  kCallOrderMismatch = 17,
  kCorruptPeer = 18,
  kPeerTimeout = 19,
  kPeerDead = 20,
  kPeerClosed = 21,
  kPoisoned = 22,
  kFaultInjected = 23,      // deliberately: cpu/fault.h
  kInterrupted = 24,        // an exception of a signal handler in this rank's own process
  kBoundMismatch = 25,      // ranks gave a dispatch different max_tokens
  kRowFormatMismatch = 26,  // ranks gave a dispatch rows of different dtypes or scale counts
  // Errors of this rank only: nothing was announced.
  kClosed = 32,
  kConcurrentUse = 33,
  kForked = 34,
};

// True for the refusals above. The code may come from a peer's header and hold any number.
MOE_RT_FN constexpr bool is_refusal(Code code) { return code > Code::kOk && code <= Code::kCapacityOverflow; }

enum class Op : int32_t { kNone = 0, kDispatch = 1, kCombine = 2, kDispatchBackward = 3, kCombineBackward = 4 };

// Ops of one kind share a sequence number and a pool of windows.
enum class Kind : int32_t { kDispatch = 0, kCombine = 1 };
inline constexpr int kNumKinds = 2;

MOE_RT_FN constexpr Kind kind_of(Op op) {
  return op == Op::kDispatch || op == Op::kCombineBackward ? Kind::kDispatch : Kind::kCombine;
}

enum class Phase : int32_t { kNone = 0, kPublish = 1, kWait = 2, kGather = 3, kPush = 4, kReduce = 5 };

// Status of an op. `got` and `expected` depend on the code: an expert id and E; tokens and their maximum; the maxima of
// two ranks; rows and their minimum or maximum; two sequence numbers; two config hashes; two call words (call_word in
// signal.h).
struct Status {
  Code code = Code::kOk;
  Op op = Op::kNone;
  Phase phase = Phase::kNone;
  int32_t peer = -1;
  uint64_t seq = 0;
  int64_t got = 0, expected = 0;
  MOE_RT_FN bool ok() const { return code == Code::kOk; }
};

}  // namespace moe_rt
