// The scheduler: it picks the next lane, starts and ends blocks, and reports faults.
#include "device.h"

#include <chrono>
#include <cstdio>
#include <optional>

namespace ptx {

namespace {
constexpr auto kHang = std::chrono::seconds(300);  // limit of a time with nothing but waits
constexpr auto kPause = std::chrono::microseconds(200);
constexpr int kMostPatience = 128;
constexpr int kTurnsToArrive = 16;  // turns of lanes until the next part of a copy arrives
}  // namespace

void Device::serve() {
  using Clock = std::chrono::steady_clock;
  std::unique_lock lock(mutex_);
  std::optional<Clock::time_point> idle_since;
  uint64_t looked = 0;  // consecutive naps at the last wait for hosts
  for (;;) {
    hosts_gone_.wait(lock, [&] { return hosts_are_gone(); });
    start_blocks();
    check_deadlock();
    if (ready_.empty()) {
      work_.wait(lock);
      continue;
    }
    run(random() % ready_.size());
    if (naps_in_a_row_ == 0) looked = 0, idle_since.reset();
    const bool idle = naps_in_a_row_ - looked > 4 * ready_.size();
    if (!flight.empty() && (idle || random() % kTurnsToArrive == 0)) flight.arrive(random());
    if (!network.empty() && (idle || (!network.slow && random() % kTurnsToArrive == 0))) network.arrive(random());
    if (!idle || ready_.empty()) continue;
    looked = naps_in_a_row_;
    if (!idle_since) idle_since = Clock::now();
    if (Clock::now() - *idle_since > kHang) die(*ready_[0], "hang: all lanes wait, and nothing ends a wait");
    work_.wait_for(lock, kPause);  // every lane polls: leave the core to the hosts
  }
}

bool Device::hosts_are_gone() {
  const std::lock_guard lock(door_);
  return coming_ == 0 && woken_ == 0;
}

// Wake the hosts that wait for a launch; they check before the next turn.
void Device::tell_hosts() {
  woken_ += asleep_;
  asleep_ = 0;
  ++num_wakeups_;
  done_.notify_all();
}

void Device::start_blocks() {
  if (dead_) return;
  for (auto& stream : streams_) {
    const auto may_begin = [&] {
      if (stream->queue.empty() || stream->running.empty()) return !stream->queue.empty();
      const Running& last = *stream->running.back();
      return stream->queue.front()->early && last.lets_next == last.launch->blocks;
    };
    while (may_begin()) begin_launch(*stream);
  }
  // Blocks take the available capacity first come, first served, as on a GPU.
  for (auto& stream : streams_) {
    for (auto& running : stream->running) {
      while (running->next_block < running->launch->blocks && resident_.size() < room_) start_block(*running);
    }
  }
}

// A launch that may begin early knows nothing of its predecessor until it has awaited its end, even if that has ended.
void Device::begin_launch(Stream& stream) {
  auto launch = stream.queue.front();
  stream.queue.pop_front();
  auto running = std::make_unique<Running>();
  running->launch = launch;
  for (uint32_t i = 0; i < streams_.size(); ++i) {
    if (streams_[i].get() == &stream) running->stream = i;
  }
  running->number = stream.begun++;
  stream.early += !stream.running.empty();
  running->before = launch->early ? stream.before : stream.clock;
  running->before.join(launch->before, names);
  stream.before = running->after = running->before;
  stream.running.push_back(std::move(running));
}

void Device::start_block(Running& running) {
  const Launch& launch = *running.launch;
  const Entry& entry = *launch.entry;
  auto block = std::make_unique<Block>();
  block->of = &running;
  block->uid = uint32_t(names.size());
  block->index = running.next_block++;
  block->alive = launch.threads;
  block->clock = running.before;
  block->shared.assign(entry.dynamic_offset + launch.dynamic_bytes + 16, char(kGarbage));
  block->shadow = Shadow(block->shared.size());
  block->lanes = std::vector<Lane>(launch.threads);
  block->warps = std::vector<Warp>((launch.threads + 31) / 32);
  names.push_back({running.stream, running.number});
  past_.push_back({&entry, block->index, running.stream, block->uid, -1});
  for (uint32_t i = 0; i < launch.threads; ++i) {
    Lane& lane = block->lanes[i];
    lane.block = block.get();
    lane.ids = {i, launch.threads, block->index, launch.blocks};
    ready_.push_back(&lane);
  }
  resident_[block->uid] = std::move(block);
}

// Give the lane a turn, which ends in pause, in fail or in end_lane.
void Device::run(size_t turn) {
  Lane& lane = *ready_[turn];
  ready_[turn] = ready_.back();
  ready_.pop_back();
  lane.patience = 1 + int(random() % kMostPatience);
  ++wound_ns_;
  current_ = &lane;
  if (lane.state == State::kFresh) {
    lane.state = State::kReady;
    lane.stack = stacks_.take();
    lane.local.assign(lane.block->of->launch->entry->local_bytes + 16, char(kGarbage));
    start_fiber(scheduler_, lane.stack, &Device::enter);
  } else {
    switch_fiber(scheduler_, lane.context);
  }
  current_ = nullptr;
  if (dead_) return;
  naps_in_a_row_ = lane.napped && lane.state == State::kReady ? naps_in_a_row_ + 1 : 0;
  if (lane.state == State::kDone) {
    stacks_.give(lane.stack);
    end_lane(lane);
  } else if (lane.state == State::kReady) {
    ready_.push_back(&lane);
  }
}

void Device::enter() {
  Device& device = get();
  Lane& lane = *device.current_;
  lane.block->of->launch->entry->run(lane, lane.ids);
  Block& block = *lane.block;
  Warp& warp = block.warps[lane.ids.tid / 32];
  const uint32_t bit = 1u << lane.ids.tid % 32;
  leave_copies(lane);
  if (block.of->launch->early && !lane.awaited) device.fail(lane, "a lane ends that has not awaited the launch before");
  if (block.at_barrier > 0) device.fail(lane, "barrier divergence: a lane ends while others wait at a barrier");
  if (warp.mask & bit) device.fail(lane, "wrong mask: a lane ends that its warp waits for");
  warp.gone |= bit;
  lane.state = State::kDone;
  _longjmp(device.scheduler_, 1);
}

void Device::pause(Lane& lane) { switch_fiber(lane.context, scheduler_); }

void Device::make_ready(Lane& lane) {
  lane.state = State::kReady;
  if (&lane != current_) ready_.push_back(&lane);
}

void Device::end_lane(Lane& lane) {
  Block& block = *lane.block;
  if (lane.learned) block.of->after.join(*lane.learned, names);
  if (--block.alive == 0) end_block(block);
}

void Device::end_block(Block& block) {
  Running& running = *block.of;
  running.after.join(block.clock, names);
  for (const Warp& warp : block.warps) running.after.join(warp.clock, names);
  if (!block.lets_next) ++running.lets_next;
  resident_.erase(block.uid);
  if (++running.finished < running.launch->blocks) return;
  Stream& stream = *streams_[running.stream];
  stream.clock.join(running.after, names);
  stream.clock.learn_launch(running.stream, running.number);
  ++stream.done;
  stream.running.pop_front();
  for (auto& [uid, other] : resident_) {
    if (stream.running.empty() || other->of != stream.running.front().get()) continue;
    for (Lane& lane : other->lanes) {
      if (lane.state == State::kAwaitsLaunch) make_ready(lane);
    }
  }
  tell_hosts();
}

void Device::await_launch_before(Lane& lane) {
  const Running& running = *lane.block->of;
  Stream& stream = *streams_[running.stream];
  while (stream.running.front().get() != &running) {
    lane.state = State::kAwaitsLaunch;
    pause(lane);
  }
  learned(lane).join(stream.clock, names);
  lane.awaited = true;
}

void Device::check_deadlock() {
  if (dead_) return;
  for (auto& [uid, block] : resident_) {
    if (block->blocked < block->alive) continue;
    for (Lane& lane : block->lanes) {
      if (lane.state != State::kAtBarrier && lane.state != State::kInWarp) continue;
      return die(lane, "deadlock: every lane of the block waits, this one here");
    }
  }
}

bool Device::ordered(Lane& lane, const Record& earlier, const Record& mine) const {
  const Moment& m = earlier.moment;
  const Block& block = *lane.block;
  if (m.block == block.uid) {
    if (m.lane == mine.moment.lane || m.barriers < block.barriers) return true;
    if (m.lane / 32 == mine.moment.lane / 32 && m.syncs < mine.moment.syncs) return true;
  }
  if (earlier.how & mine.how & kAtomic) {
    if (names[m.block].stream == block.of->stream || (earlier.how & mine.how & kSystem)) return true;
  }
  return knows(lane, m, kLanes);
}

bool Device::knows(const Lane& lane, const Moment& m, Proxy proxy) const {
  const Block& block = *lane.block;
  return block.clock.knows(m, names, proxy) || block.warps[lane.ids.tid / 32].clock.knows(m, names, proxy) ||
         (lane.learned && lane.learned->knows(m, names, proxy));
}

Clock Device::knowledge(const Lane& lane) const {
  Clock clock = lane.block->clock;
  const Warp& warp = lane.block->warps[lane.ids.tid / 32];
  clock.join(warp.clock, names);
  if (lane.learned) clock.join(*lane.learned, names);
  clock.learn_block(lane.block->uid, lane.block->barriers);
  if (warp.syncs) clock.learn_warp(lane.block->uid, lane.ids.tid / 32, warp.syncs);
  clock.learn_lane(lane.block->uid, uint16_t(lane.ids.tid), uint16_t(lane.releases + 1));
  return clock;
}

Moment Device::now(const Lane& lane) const {
  const Block& block = *lane.block;
  return {block.uid, uint16_t(lane.ids.tid), block.barriers, block.warps[lane.ids.tid / 32].syncs, lane.releases};
}

Clock& Device::learned(Lane& lane) {
  if (!lane.learned) lane.learned = std::make_unique<Clock>();
  return *lane.learned;
}

uint32_t Device::name_copies(const Lane& lane) {
  const BlockName name = names[lane.block->uid];
  Past past = past_[lane.block->uid];
  past.lane = int(lane.ids.tid);
  names.push_back(name);
  past_.push_back(past);
  return uint32_t(past_.size() - 1);
}

uint32_t Device::name_puts(const Lane& lane) {
  const uint32_t uid = name_copies(lane);
  names[uid] = {kNobody, 0};  // the end of its launch does not complete a put
  past_[uid].owner = kNobody;
  return uid;
}

std::string Device::describe(const Record& record) const {
  const Past& past = past_[record.moment.block];  // puts and copies: the launch that began to number them
  const Site& site = *record.site;
  return std::string(site.entry) + ", block " + std::to_string(past.index) + ", lane " +
         std::to_string(past.lane < 0 ? record.moment.lane : past.lane) + ", stream " + std::to_string(past.stream) +
         ": `" + site.text + "` in line " + std::to_string(site.line) + " of the entry, from " + site.where;
}

void Device::fail(const Lane& lane, const std::string& what) {
  die(lane, what);
  _longjmp(scheduler_, 1);
}

void Device::die(const Lane& lane, const std::string& what) {
  const Record here{{lane.block->uid, uint16_t(lane.ids.tid), 0, 0, 0}, 0, lane.at()};
  report_ = what + "\n  at " + describe(here);
  dead_ = true;
  ready_.clear();
  tell_hosts();
}

}  // namespace ptx
