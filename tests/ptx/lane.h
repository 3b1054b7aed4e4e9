// Interface of a translated kernel: its description, and its services: memory, barriers, the other lanes of its warp.
#pragma once

#include <cstdint>

namespace ptx {

struct Lane;

enum Space : uint32_t { kGeneric, kGlobal, kShared, kLocal, kParam };

// Kind of a memory access, as bits. Orders and scopes apply to atomic accesses; without kSystem the scope is one
// device, which here is one rank.
enum How : uint32_t { kRead = 1, kWrite = 2, kAtomic = 4, kAcquire = 8, kRelease = 16, kSystem = 32 };

// An instruction: its line in the entry, its text, and the source line that it was compiled from; and the entry.
struct Site {
  int line;
  const char *text, *where, *entry;
};

// kReached: the instruction was executed. kMuted: it is to have no order, or to be no barrier, as if the PTX had none.
enum Mark : unsigned char { kReached = 1, kMuted = 2 };

struct Ids {
  uint32_t tid, ntid, ctaid, nctaid;
};

struct Shuffled {
  uint32_t value;
  bool valid;
};

inline constexpr uint64_t kParamStride = 1 << 16;  // distance between parameters' addresses

struct Entry {
  const char* name;
  void (*run)(Lane&, const Ids&);
  const uint32_t* param_bytes;
  uint32_t num_params, static_bytes, dynamic_offset, local_bytes, max_threads;
  const Site* sites;
  uint32_t num_sites;
  unsigned char* marks;  // Mark by site of an atomic access or a barrier
};

}  // namespace ptx

extern "C" {
// Return a pointer to the accessed memory. The access is checked, and other lanes may run before it.
void* ptx_access(ptx::Lane& lane, ptx::Space space, uint64_t address, uint32_t bytes, uint32_t how, int site);
void ptx_barrier(ptx::Lane& lane, int site);
ptx::Shuffled ptx_shuffle_bfly(ptx::Lane& lane, uint32_t value, uint32_t by, uint32_t clamp, uint32_t mask, int site);
ptx::Shuffled ptx_shuffle_idx(ptx::Lane& lane, uint32_t value, uint32_t by, uint32_t clamp, uint32_t mask, int site);
ptx::Shuffled ptx_shuffle_up(ptx::Lane& lane, uint32_t value, uint32_t by, uint32_t clamp, uint32_t mask, int site);
uint32_t ptx_reduce_max(ptx::Lane& lane, uint32_t value, uint32_t mask, int site);
void ptx_warp_barrier(ptx::Lane& lane, uint32_t mask, int site);
// Dependent launches: griddepcontrol.
void ptx_let_next_begin(ptx::Lane& lane, int site);
void ptx_await_launch_before(ptx::Lane& lane, int site);
void ptx_sleep(ptx::Lane& lane, int site);
uint64_t ptx_clock(ptx::Lane& lane);
// Generic addresses of the lane's local memory and the block's shared memory.
uint64_t ptx_local(ptx::Lane& lane);
uint64_t ptx_shared(ptx::Lane& lane);
bool ptx_is_local(ptx::Lane& lane, uint64_t address);

// Barriers in shared memory, and bulk copies: see bulk.h.
void ptx_mbarrier_init(ptx::Lane& lane, uint64_t address, uint32_t count, int site);
void ptx_mbarrier_inval(ptx::Lane& lane, uint64_t address, int site);
void ptx_mbarrier_arrive(ptx::Lane& lane, uint64_t address, uint32_t count, uint32_t bytes, bool release, int site);
bool ptx_mbarrier_passed(ptx::Lane& lane, uint64_t address, uint32_t parity, bool acquire, int site);
void ptx_copy_in(ptx::Lane& lane, uint64_t to, uint64_t from, uint32_t bytes, uint64_t barrier, int site);
void ptx_copy_out(ptx::Lane& lane, uint64_t to, uint64_t from, uint32_t bytes, int site);
void ptx_copy_commit(ptx::Lane& lane, int site);
void ptx_copy_wait(ptx::Lane& lane, uint32_t groups, bool read, int site);
// The network: see network.h.
void ptx_network_get(ptx::Lane& lane, uint64_t to, uint64_t from, uint64_t bytes, uint32_t pe, bool block, int site);
void ptx_network_put(ptx::Lane& lane, uint64_t to, uint64_t from, uint64_t bytes, uint32_t pe, int site);
void ptx_network_put_word(ptx::Lane& lane, uint64_t to, uint64_t word, uint32_t bytes, bool is_signal, uint32_t pe,
                          int site);
void ptx_network_put_signal(ptx::Lane& lane, uint64_t to, uint64_t from, uint64_t bytes, uint64_t flag, uint64_t value,
                            uint32_t how, uint32_t pe, int site);
uint64_t ptx_network_replace(ptx::Lane& lane, uint64_t place, uint64_t expected, uint64_t value, uint32_t pe, int site);
void ptx_network_quiet(ptx::Lane& lane, int site);
void ptx_network_fence(ptx::Lane& lane, int site);
void ptx_show_network(ptx::Lane& lane, int site);
// Make the lane's knowledge of shared memory, of global memory, or only its new barriers visible to copies.
void ptx_show_copies(ptx::Lane& lane, bool shared, bool global, int site);
void ptx_show_barriers(ptx::Lane& lane, int site);
}
