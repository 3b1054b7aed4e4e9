// The device: streams of launches, whose blocks run their lanes one at a time, in an order drawn from a seed.
//
// One thread runs all lanes of all launches, so nothing that they share needs a lock; the host's threads only queue
// launches, wait for streams and make memory, between two turns of lanes.
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
  std::vector<char> params;  // one after the other
  bool early;                // may begin before the one before it has ended, for whose end its lanes wait
  Clock before = {};         // what the thread that launched it had waited for
};

struct Block;

enum class State { kFresh, kReady, kAtBarrier, kInWarp, kAwaitsLaunch, kDone };

struct Lane {
  Block* block = nullptr;
  Ids ids{};
  State state = State::kFresh;
  jmp_buf context;
  char* stack = nullptr;
  int patience = 0;  // accesses until others have a turn
  int site = 0;
  bool awaited = false;  // the launch before
  bool napped = false;   // and has written nothing since: it waits, or has just seen what it waited for
  uint16_t releases = 0;
  std::unique_ptr<Clock> learned;  // since the last barrier
  std::vector<char> local;
  std::vector<Moment> fetched;       // by the network, and not settled yet
  std::unique_ptr<Started> started;  // copies
  uint32_t given = 0, got[32] = {};  // to and from a warp's collective
  const Site* at() const;            // the instruction
};

// A collective of a warp that some of its lanes have come to.
struct Warp {
  uint32_t mask = 0, arrived = 0, gone = 0;
  int site = 0;
  uint16_t syncs = 0;
  Clock clock = {};  // of every lane since the warp's last barrier, while the block has had none
};

struct Running;

struct Block {
  Running* of;
  uint32_t uid, index;
  uint32_t alive, at_barrier = 0, blocked = 0;
  uint16_t barriers = 0;
  int barrier_site = 0;
  bool lets_next = false;  // begin
  Clock clock;             // of every lane since the last barrier
  std::vector<char> shared;
  Shadow shadow;
  std::map<uint64_t, Mbarrier> mbarriers;  // by offset in shared memory
  std::vector<Lane> lanes;
  std::vector<Warp> warps;
};

// A launch whose blocks are being run.
struct Running {
  std::shared_ptr<const Launch> launch;
  uint32_t stream, number, next_block = 0, finished = 0, lets_next = 0;
  Clock before, after;
};

inline const Site* Lane::at() const { return &block->of->launch->entry->sites[site]; }

// Of a block, which is its own owner, or of the copies of one of its lanes, or of the puts of a warp, which have none.
struct Past {
  const Entry* entry;
  uint32_t index, stream, owner;
  int lane;  // -1 of a block
};

struct Stream {
  std::deque<std::shared_ptr<const Launch>> queue;
  std::deque<std::unique_ptr<Running>> running;  // more than one where launches begin early
  uint32_t queued = 0, begun = 0, done = 0, early = 0;
  Clock clock;   // of launches that have ended
  Clock before;  // the launch that began last
  bool capturing = false;
  std::vector<std::shared_ptr<const Launch>> captured;
};

class Device {
 public:
  static Device& get();

  // What tests set before a launch: the order of turns, how many blocks run at once, and whether time passes by itself.
  void configure(uint64_t seed, uint32_t room, bool real_time);
  void wind(int64_t ns);
  void slow_network(bool slow);  // puts arrive when somebody waits for them, or all lanes only wait
  std::string report();
  uint64_t accesses() const { return accesses_; }
  uint64_t facts();  // of the clock that holds most
  uint32_t early();  // launches that began before the one before had ended

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

  // For lanes, on the device's own thread.
  [[noreturn]] void fail(const Lane& lane, const std::string& what);
  void die(const Lane& lane, const std::string& what);  // between turns, too
  std::string describe(const Record& record) const;
  void pause(Lane& lane);  // comes back when it is this lane's turn again
  void make_ready(Lane& lane);
  void await_launch_before(Lane& lane);
  bool ordered(Lane& lane, const Record& earlier, const Record& mine) const;
  bool knows(const Lane& lane, const Moment& m, Proxy proxy) const;
  Clock knowledge(const Lane& lane) const;
  Moment now(const Lane& lane) const;
  Clock& learned(Lane& lane);
  uint32_t name_copies(const Lane& lane);  // a uid for copies of this lane
  uint32_t name_puts(const Lane& lane);    // and for puts of its warp, in this launch and later ones
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
  std::mutex door_;             // of coming_
  int coming_ = 0;              // host threads that wait for the device to stand still; it does not go on before
  int asleep_ = 0, woken_ = 0;  // those that wait for a launch; of them, those that have yet to look again
  uint64_t told_ = 0;           // how often those were told
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
