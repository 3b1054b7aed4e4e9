// The device: streams of launches, whose blocks run their lanes one at a time, in an order drawn from a seed.
//
// One thread runs all lanes of all launches, so their shared state needs no lock. The host's threads only queue
// launches, wait for streams and allocate memory, between two turns of lanes.
#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "bulk.h"
#include "fibers.h"
#include "memory.h"
#include "network.h"

namespace ptx {

struct Launch {
  const Entry* entry;
  uint32_t blocks, threads, dynamic_bytes;
  std::vector<char> params;  // concatenated
  bool early;                // may begin before its predecessor has ended; its lanes wait for that end
  Clock before = {};         // what the launching thread had waited for
};

struct Block;

enum class State { kFresh, kReady, kAtBarrier, kInWarp, kAwaitsLaunch, kDone };

struct Lane {
  Block* block = nullptr;
  Ids ids{};
  State state = State::kFresh;
  jmp_buf context;
  char* stack = nullptr;
  int patience = 0;  // accesses until another lane's turn
  int site = 0;
  bool awaited = false;  // the previous launch
  bool napped = false;   // and has written nothing since: it is waiting, or its wait has just ended
  uint16_t releases = 0;
  std::unique_ptr<Clock> learned;  // since the last barrier
  std::vector<char> local;
  std::vector<Moment> fetched;       // by the network, not settled yet
  std::unique_ptr<Started> started;  // copies
  uint32_t given = 0, got[32] = {};  // input and output of a warp's collective
  const Site* at() const;            // the instruction
};

// A collective of a warp that some of its lanes have reached.
struct Warp {
  uint32_t mask = 0, arrived = 0, gone = 0;
  int site = 0;
  uint16_t syncs = 0;
  Clock clock = {};  // every lane since the warp's last barrier, while the block has had none
};

struct Running;

struct Block {
  Running* of;
  uint32_t uid, index;
  uint32_t alive, at_barrier = 0, blocked = 0;
  uint16_t barriers = 0;
  int barrier_site = 0;
  bool lets_next = false;  // the next launch may begin
  Clock clock;             // every lane since the last barrier
  std::vector<char> shared;
  Shadow shadow;
  std::map<uint64_t, Mbarrier> mbarriers;  // by offset in shared memory
  std::vector<Lane> lanes;
  std::vector<Warp> warps;
};

// A launch whose blocks are running.
struct Running {
  std::shared_ptr<const Launch> launch;
  uint32_t stream, number, next_block = 0, finished = 0, lets_next = 0;
  Clock before, after;
};

inline const Site* Lane::at() const { return &block->of->launch->entry->sites[site]; }

// The past of a block (which owns itself), of the copies of one of its lanes, or of the puts of a warp (no owner).
struct Past {
  const Entry* entry;
  uint32_t index, stream, owner;
  int lane;  // -1 for a block
};

struct Stream {
  std::deque<std::shared_ptr<const Launch>> queue;
  std::deque<std::unique_ptr<Running>> running;  // more than one if launches begin early
  uint32_t queued = 0, begun = 0, done = 0, early = 0;
  Clock clock;   // completed launches
  Clock before;  // the launch that began last
  bool capturing = false;
  std::vector<std::shared_ptr<const Launch>> captured;
};

class Device {
 public:
  static Device& get();

  // Set before a launch: the order of turns, the number of blocks that run concurrently, and whether time passes by
  // itself.
  void configure(uint64_t seed, uint32_t room, bool real_time);
  void wind(int64_t ns);
  void slow_network(bool slow);  // puts arrive when a lane waits for them, or when every lane waits
  std::string report();
  uint64_t accesses() const { return accesses_; }
  uint64_t facts();  // size of the largest clock
  uint32_t early();  // launches that began before their predecessor had ended

  uint32_t make_stream();
  void launch(uint32_t stream, std::shared_ptr<Launch> launch);
  bool synchronize(uint32_t stream);  // false once the device is dead
  void begin_capture(uint32_t stream);
  std::vector<std::shared_ptr<const Launch>> end_capture(uint32_t stream);
  bool capturing(uint32_t stream);
  bool dead();

  void* allocate(uint64_t bytes);
  void free(void* memory);
  bool narrow(uint64_t begin, uint64_t bytes);
  void join_network(const std::vector<uint64_t>& begins, uint32_t rank, uint32_t stream, uint64_t bytes);

  // Called by lanes, on the device's thread.
  [[noreturn]] void fail(const Lane& lane, const std::string& what);
  void die(const Lane& lane, const std::string& what);  // also between turns
  std::string describe(const Record& record) const;
  void pause(Lane& lane);  // returns at this lane's next turn
  void make_ready(Lane& lane);
  void await_launch_before(Lane& lane);
  bool ordered(Lane& lane, const Record& earlier, const Record& mine) const;
  bool knows(const Lane& lane, const Moment& m, Proxy proxy) const;
  Clock knowledge(const Lane& lane) const;
  Moment now(const Lane& lane) const;
  Clock& learned(Lane& lane);
  uint32_t name_copies(const Lane& lane);  // a uid for copies of this lane
  uint32_t name_puts(const Lane& lane);    // same for puts of its warp, across launches
  const Past& past(uint32_t uid) const { return past_[uid]; }
  Flight flight;
  Network network;
  Memory memory;
  std::mt19937_64 random;
  uint64_t clock_ns() const;
  uint64_t accesses_ = 0;
  std::vector<BlockName> names{{0, 0}};  // of blocks, by uid

 private:
  class Host;
  void serve();
  void tell_hosts();
  bool hosts_are_gone();
  void start_blocks();
  void begin_launch(Stream& stream);
  void start_block(Running& running);
  void run(size_t turn);
  void end_lane(Lane& lane);
  void end_block(Block& block);
  void check_deadlock();
  static void enter();

  std::mutex mutex_;
  std::condition_variable work_, done_, hosts_gone_;
  std::mutex door_;             // guards coming_
  int coming_ = 0;              // host threads that wait for the device to pause; it resumes after them
  int asleep_ = 0, woken_ = 0;  // hosts that wait for a launch; of them, the hosts that have yet to check again
  uint64_t num_wakeups_ = 0;    // number of wake-ups
  std::thread thread_;
  bool started_ = false, dead_ = false, real_time_ = false;
  uint64_t wound_ns_ = 1;
  uint32_t room_ = 16;
  std::string report_;
  std::vector<std::unique_ptr<Stream>> streams_;
  std::map<uint32_t, std::unique_ptr<Block>> resident_;
  std::vector<Past> past_{{}};  // by uid
  std::vector<Lane*> ready_;
  Stacks stacks_;
  jmp_buf scheduler_;
  Lane* current_ = nullptr;
  uint64_t naps_in_a_row_ = 0;
};

}  // namespace ptx
