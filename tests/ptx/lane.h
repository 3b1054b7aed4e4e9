// What a translated kernel tells of itself, and what it may ask for: memory, barriers, the other lanes of its warp.
#pragma once

#include <cstdint>

namespace ptx {

struct Lane;

enum Space : uint32_t { kGeneric, kGlobal, kShared, kLocal, kParam };

// How memory is accessed, as bits. Orders and scopes are of atomic accesses; without kSystem the scope is one device,
// which here is one rank.
enum How : uint32_t { kRead = 1, kWrite = 2, kAtomic = 4, kAcquire = 8, kRelease = 16, kSystem = 32 };

// An instruction: its line in the entry, its text, and the source line that it was compiled from.
struct Site {
  int line;
  const char *text, *where;
};

struct Ids {
  uint32_t tid, ntid, ctaid, nctaid;
};

struct Shuffled {
  uint32_t value;
  bool valid;
};

inline constexpr uint64_t kParamStride = 1 << 16;  // parameters' addresses are so far apart

struct Entry {
  const char* name;
  void (*run)(Lane&, const Ids&);
  const uint32_t* param_bytes;
  uint32_t num_params, static_bytes, dynamic_offset, local_bytes, max_threads;
  const Site* sites;
};

}  // namespace ptx

extern "C" {
// Where the access may take place; it is checked, and other lanes may run before it.
void* ptx_access(ptx::Lane& lane, ptx::Space space, uint64_t address, uint32_t bytes, uint32_t how, int site);
void ptx_barrier(ptx::Lane& lane, int site);
ptx::Shuffled ptx_shuffle(ptx::Lane& lane, uint32_t value, uint32_t by, uint32_t clamp, uint32_t mask, int site);
uint32_t ptx_reduce_max(ptx::Lane& lane, uint32_t value, uint32_t mask, int site);
void ptx_sleep(ptx::Lane& lane, int site);
uint64_t ptx_clock(ptx::Lane& lane);
// Where the lane's local and the block's shared memory begin, as generic addresses.
uint64_t ptx_local(ptx::Lane& lane);
uint64_t ptx_shared(ptx::Lane& lane);
bool ptx_is_local(ptx::Lane& lane, uint64_t address);
}
