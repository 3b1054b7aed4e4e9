// Requests of host threads to the device, between two turns of its lanes.
#include <chrono>

#include "device.h"

namespace ptx {

namespace {
thread_local Clock host_clock;  // what this thread has waited for
}

// Pauses the device for a host thread; the device's thread lets hosts go first.
class Device::Host {
 public:
  explicit Host(Device& device) : device_(device) {
    come(1);
    lock_ = std::unique_lock(device.mutex_);
    come(-1);
  }
  ~Host() { device_.hosts_gone_.notify_one(); }

  // Return when further launches have ended or the device has died.
  void await_news() {
    const uint64_t num_wakeups = device_.num_wakeups_;
    ++device_.asleep_;
    device_.hosts_gone_.notify_one();
    device_.done_.wait(lock_, [&] { return device_.num_wakeups_ != num_wakeups; });
    --device_.woken_;
  }

 private:
  void come(int change) {
    const std::lock_guard lock(device_.door_);
    device_.coming_ += change;
  }

  Device& device_;
  std::unique_lock<std::mutex> lock_;
};

Device& Device::get() {
  static Device* const device = new Device;  // never destroyed: its thread ends with the process
  return *device;
}

void Device::configure(uint64_t seed, uint32_t room, bool real_time) {
  const Host host(*this);
  random.seed(seed);
  room_ = room;
  real_time_ = real_time;
}

void Device::wind(int64_t ns) {
  const Host host(*this);
  wound_ns_ += uint64_t(ns);
}

void Device::slow_network(bool slow) {
  const Host host(*this);
  network.slow = slow;
}

uint64_t Device::clock_ns() const {
  using std::chrono::nanoseconds, std::chrono::steady_clock;
  const auto now = std::chrono::duration_cast<nanoseconds>(steady_clock::now().time_since_epoch());
  return real_time_ ? uint64_t(now.count()) : wound_ns_;
}

std::string Device::report() {
  const Host host(*this);
  return report_;
}

uint64_t Device::facts() {
  const Host host(*this);
  size_t most = 0;
  for (const auto& stream : streams_) most = std::max(most, stream->clock.size());
  return most;
}

uint32_t Device::early() {
  const Host host(*this);
  uint32_t launches = 0;
  for (const auto& stream : streams_) launches += stream->early;
  return launches;
}

bool Device::dead() {
  const Host host(*this);
  return dead_;
}

uint32_t Device::make_stream() {
  const Host host(*this);
  streams_.push_back(std::make_unique<Stream>());
  return uint32_t(streams_.size() - 1);
}

void Device::launch(uint32_t stream, std::shared_ptr<Launch> launch) {
  const Host host(*this);
  Stream& s = *streams_[stream];
  if (s.capturing) {
    s.captured.push_back(std::move(launch));
    return;
  }
  launch->before = host_clock;
  s.queue.push_back(std::move(launch));
  ++s.queued;
  if (!started_) {
    started_ = true;
    thread_ = std::thread([this] { serve(); });
    thread_.detach();
  }
  work_.notify_all();
}

bool Device::synchronize(uint32_t stream) {
  Host host(*this);
  Stream& s = *streams_[stream];
  const uint32_t until = s.queued;
  while (!dead_ && s.done < until) host.await_news();
  host_clock.join(s.clock, names);
  return !dead_;
}

void Device::begin_capture(uint32_t stream) {
  const Host host(*this);
  streams_[stream]->capturing = true;
}

std::vector<std::shared_ptr<const Launch>> Device::end_capture(uint32_t stream) {
  const Host host(*this);
  streams_[stream]->capturing = false;
  return std::move(streams_[stream]->captured);
}

bool Device::capturing(uint32_t stream) {
  const Host host(*this);
  return streams_[stream]->capturing;
}

void* Device::allocate(uint64_t bytes) {
  const Host host(*this);
  return memory.allocate(bytes);
}

void Device::free(void* address) {
  const Host host(*this);
  const auto begin = reinterpret_cast<uint64_t>(address);
  if (const Put* const put = dead_ ? nullptr : network.under_way_to(begin, memory.bytes_at(begin))) {
    report_ =
        std::string("freed too early: memory to which a put is under way, of ") + past_[put->moment.block].entry->name;
    dead_ = true;
    ready_.clear();
    tell_hosts();
  }
  memory.free(begin);
}

bool Device::narrow(uint64_t begin, uint64_t bytes) {
  const Host host(*this);
  return memory.narrow(begin, bytes);
}

void Device::join_network(const std::vector<uint64_t>& begins, uint32_t rank, uint32_t stream, uint64_t bytes) {
  const Host host(*this);
  network.join(begins, rank, stream, bytes);
}

}  // namespace ptx
