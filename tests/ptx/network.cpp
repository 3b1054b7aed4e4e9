// Network operations of lanes, as NVSHMEM's calls, and the arrival of puts.
#include "network.h"

#include <algorithm>
#include <cstring>

#include "device.h"
#include "places.h"

namespace ptx {
namespace {

constexpr int kTurnsOfSlow = 64;

bool within(uint64_t address, uint64_t bytes, uint64_t begin, uint64_t size) {
  return address >= begin && address - begin <= size && bytes <= size - (address - begin);
}

Record record_of(const Lane& lane, uint32_t how) { return {Device::get().now(lane), uint16_t(how), lane.at()}; }

// Return memory that a card accesses for the lane. A card reads writes of lanes only if a fence has shown them to it.
char* through_card(Lane& lane, uint64_t address, uint64_t bytes, How how) {
  Device& device = Device::get();
  const Place place = find(lane, kGlobal, address, uint32_t(bytes), how, 1);
  const Record mine = record_of(lane, how);
  const auto seen = [&](const Record& earlier) {
    const bool by_lanes = device.past(earlier.moment.block).owner != kNobody;
    if (how == kRead && by_lanes && (earlier.how & kWrite)) return device.knows(lane, earlier.moment, kNetwork);
    return device.ordered(lane, earlier, mine);
  };
  place.shadow->visit(place.offset, uint32_t(bytes), mine, seen, [&](const Record& other) {
    const bool known = device.ordered(lane, other, mine);
    report_race(lane, place, how, other, known ? "no fence shows the network the" : nullptr);
  });
  return static_cast<char*>(place.pointer);
}

}  // namespace

void Network::join(const std::vector<uint64_t>& begins, uint32_t rank, uint32_t stream, uint64_t bytes) {
  const auto is_same = [&](const Symmetric& each) { return each.begins == begins; };
  auto found = std::find_if(allocations_.begin(), allocations_.end(), is_same);
  if (found == allocations_.end()) {
    std::erase_if(allocations_, [&](const Symmetric& old) { return within(old.begins[0], 1, begins[0], bytes); });
    found = allocations_.insert(allocations_.end(), {begins, std::vector<uint32_t>(begins.size(), kNobody), bytes});
  }
  found->streams[rank] = stream;
}

const Symmetric& Network::own(Lane& lane, uint64_t address, uint64_t bytes) const {
  const uint32_t stream = lane.block->of->stream;
  for (const Symmetric& each : allocations_) {
    for (size_t rank = 0; rank < each.begins.size(); ++rank) {
      if (each.streams[rank] == stream && within(address, bytes, each.begins[rank], each.bytes)) return each;
    }
  }
  Device::get().fail(lane, "not symmetric: " + std::to_string(bytes) + " bytes outside of the rank's symmetric memory");
}

uint64_t Network::there(Lane& lane, uint64_t here, uint64_t bytes, uint32_t pe) const {
  const Symmetric& mine = own(lane, here, bytes);
  const auto rank = std::find(mine.streams.begin(), mine.streams.end(), lane.block->of->stream) - mine.streams.begin();
  if (pe >= mine.begins.size()) Device::get().fail(lane, "no such rank: " + std::to_string(pe));
  return mine.begins[pe] + (here - mine.begins[size_t(rank)]);
}

void Network::get(Lane& lane, uint64_t to, uint64_t from, uint64_t bytes, uint32_t pe) {
  own(lane, to, bytes);
  const char* const source = through_card(lane, there(lane, from, bytes, pe), bytes, kRead);
  const Moment moment = next_of(lane, kGets);
  written(lane, moment, to, uint32_t(bytes), kWrite);
  std::memmove(reinterpret_cast<void*>(to), source, bytes);
  lane.fetched.push_back(moment);
}

// Check a put's write at its target: quiet, a fence or a peer's signal must order it after earlier writes.
void Network::written(Lane& lane, const Moment& moment, uint64_t to, uint32_t bytes, uint32_t how) const {
  Device& device = Device::get();
  const Place place = find(lane, kGlobal, to, bytes, how, 1);
  const Record mine{moment, uint16_t(how), lane.at()}, own = record_of(lane, how);
  const auto ordered = [&](const Record& earlier) {
    if (device.past(earlier.moment.block).owner != kNobody) return device.ordered(lane, earlier, own);
    return device.knows(lane, earlier.moment, kLanes) || device.knows(lane, earlier.moment, kNetwork);
  };
  place.shadow->visit(place.offset, bytes, mine, ordered,
                      [&](const Record& other) { report_race(lane, place, how, other, nullptr); });
}

Moment Network::next_of(Lane& lane, Kind kind) {
  const Block& block = *lane.block;
  Numbered& clock = clocks_[{block.of->stream, block.index, lane.ids.tid / 32, kind}];
  if (clock.clock == 0) clock.clock = Device::get().name_puts(lane);
  if (clock.next >= kWholeWarp) Device::get().fail(lane, "a warp has put more than the tool can count");
  const uint16_t number = clock.next++;
  return {clock.clock, number, number, 0, 0};
}

Put& Network::hand_over(Lane& lane, uint64_t to, const void* data, uint64_t bytes, bool is_signal) {
  const Moment moment = next_of(lane, is_signal ? kSignals : kRows);
  const auto* const begin = static_cast<const char*>(data);
  puts_.push_back(std::make_unique<Put>(Put{lane.block->of->stream, Device::get().now(lane), moment.block, moment.lane,
                                            is_signal, to, std::vector<char>(begin, begin + bytes)}));
  ++under_way_;
  return *puts_.back();
}

void Network::put(Lane& lane, uint64_t to, uint64_t from, uint64_t bytes, uint32_t pe) {
  own(lane, from, bytes);
  const uint64_t target = there(lane, to, bytes, pe);
  const char* const source = through_card(lane, from, bytes, kRead);
  const Put& put = hand_over(lane, target, source, bytes, false);
  written(lane, put.name(), target, uint32_t(bytes), kWrite);
}

void Network::put_word(Lane& lane, uint64_t to, uint64_t word, uint32_t bytes, bool is_signal, uint32_t pe) {
  const uint64_t target = there(lane, to, bytes, pe);
  const Put& put = hand_over(lane, target, &word, bytes, is_signal);
  written(lane, put.name(), target, bytes, kWrite | kAtomic | kSystem);
}

void Network::put_signal(Lane& lane, uint64_t to, uint64_t from, uint64_t bytes, uint64_t flag, uint64_t value,
                         uint32_t pe) {
  own(lane, from, bytes);
  const uint64_t target = there(lane, to, bytes, pe), flag_there = there(lane, flag, sizeof(value), pe);
  Clock tells = Device::get().knowledge(lane).as_seen_by(kNetwork);
  const char* const source = through_card(lane, from, bytes, kRead);
  Put& put = hand_over(lane, target, source, bytes, true);
  written(lane, put.name(), target, uint32_t(bytes), kWrite);
  written(lane, put.name(), flag_there, sizeof(value), kWrite | kAtomic | kSystem);
  tells.learn_copy(kLanes, put.clock, put.number);
  put.flag = flag_there, put.value = value, put.tells = std::move(tells);
}

uint64_t Network::replace(Lane& lane, uint64_t place, uint64_t expected, uint64_t value, uint32_t pe) {
  const uint64_t target = there(lane, place, sizeof(value), pe);
  void* const word = ptx_access(lane, kGlobal, target, sizeof(value), kRead | kWrite | kAtomic | kSystem, lane.site);
  uint64_t found;
  std::memcpy(&found, word, sizeof(found));
  if (found == expected) std::memcpy(word, &value, sizeof(value));
  return found;
}

// Deliver everything that the rank has handed over. The lane then knows the arrival of every put it knew of.
void Network::quiet(Lane& lane) {
  Device& device = Device::get();
  const uint32_t stream = lane.block->of->stream;
  for (;;) {
    std::vector<Put*> late;
    for (const auto& put : puts_) {
      if (put->stream == stream && !put->arrived) late.push_back(put.get());
    }
    if (late.empty()) break;
    arrive(*late[device.random() % late.size()]);
    for (int turn = 0; turn < (slow ? kTurnsOfSlow : 1); ++turn) device.pause(lane);  // let peers check now
  }
  const Record mine = record_of(lane, kWrite);
  std::erase_if(puts_, [&](const auto& put) {
    if (put->stream != stream || !device.ordered(lane, {put->moment, kWrite, 0}, mine)) return false;
    device.learned(lane).learn_copy(kLanes, put->clock, put->number);
    return true;
  });
}

// Order the lane's later puts after all signals whose hand-over it knows of.
void Network::fence(Lane& lane) {
  Device& device = Device::get();
  const Record mine = record_of(lane, kWrite);
  for (const auto& put : puts_) {
    if (put->stream != lane.block->of->stream || !put->is_signal) continue;
    if (!put->arrived) arrive(*put);
    if (device.ordered(lane, {put->moment, kWrite, 0}, mine)) {
      device.learned(lane).learn_copy(kNetwork, put->clock, put->number);
    }
  }
}

void Network::arrive(Put& put) {
  std::memcpy(reinterpret_cast<void*>(put.to), put.data.data(), put.data.size());
  if (put.flag) {
    std::memcpy(reinterpret_cast<void*>(put.flag), &put.value, sizeof(put.value));
    auto& [on_device, on_system] = Device::get().memory.find(put.flag, sizeof(put.value))->released;
    on_device.erase(put.flag), on_system.erase(put.flag);
    on_system[put.flag][put.stream] = std::move(put.tells);
  }
  put.arrived = true;
  put.data = {};
  --under_way_;
}

void Network::arrive(uint64_t random) {
  uint64_t skip = random % under_way_;
  for (const auto& put : puts_) {
    if (!put->arrived && skip-- == 0) return arrive(*put);
  }
}

const Put* Network::under_way_to(uint64_t begin, uint64_t bytes) const {
  for (const auto& put : puts_) {
    if (!put->arrived && within(put->to, 1, begin, bytes)) return put.get();
  }
  return nullptr;
}

}  // namespace ptx

using ptx::Device;
using ptx::Lane;

namespace {

// Run act() on one lane when all of the warp or the block have called; they continue when it is done.
template <class Act>
void together(Lane& lane, bool block, int site, Act&& act) {
  ptx::meet(lane, block, site);
  if (lane.ids.tid % (block ? lane.ids.ntid : 32) == 0) act();
  ptx::meet(lane, block, site);
}

}  // namespace

void ptx_network_get(Lane& lane, uint64_t to, uint64_t from, uint64_t bytes, uint32_t pe, bool block, int site) {
  together(lane, block, site, [&] { Device::get().network.get(lane, to, from, bytes, pe); });
}
void ptx_network_put(Lane& lane, uint64_t to, uint64_t from, uint64_t bytes, uint32_t pe, int site) {
  together(lane, false, site, [&] { Device::get().network.put(lane, to, from, bytes, pe); });
}
void ptx_network_put_word(Lane& lane, uint64_t to, uint64_t word, uint32_t bytes, bool is_signal, uint32_t pe,
                          int site) {
  lane.site = site;
  Device::get().pause(lane);
  Device::get().network.put_word(lane, to, word, bytes, is_signal, pe);
}
void ptx_network_put_signal(Lane& lane, uint64_t to, uint64_t from, uint64_t bytes, uint64_t flag, uint64_t value,
                            uint32_t how, uint32_t pe, int site) {
  constexpr uint32_t kSet = 9;  // NVSHMEM_SIGNAL_SET
  lane.site = site;
  Device::get().pause(lane);
  if (how != kSet) Device::get().fail(lane, "a signal that is not set, which the tool does not know");
  Device::get().network.put_signal(lane, to, from, bytes, flag, value, pe);
}
uint64_t ptx_network_replace(Lane& lane, uint64_t place, uint64_t expected, uint64_t value, uint32_t pe, int site) {
  lane.site = site;
  return Device::get().network.replace(lane, place, expected, value, pe);
}
void ptx_network_quiet(Lane& lane, int site) {
  lane.site = site;
  if (ptx::is_muted(lane, site)) return;
  Device::get().pause(lane);
  Device::get().network.quiet(lane);
}
void ptx_network_fence(Lane& lane, int site) {
  lane.site = site;
  if (ptx::is_muted(lane, site)) return;
  Device::get().pause(lane);
  Device::get().network.fence(lane);
}

// A fence at system scope. Orders through relaxed words are not tracked, as no kernel here relies on them.
void ptx_show_network(Lane& lane, int site) {
  lane.site = site;
  if (ptx::is_muted(lane, site)) return;
  for (const ptx::Moment& get : lane.fetched) {
    Device::get().learned(lane).learn_copy(ptx::kLanes, get.block, get.lane);
  }
  lane.fetched.clear();
  const ptx::Clock all = Device::get().knowledge(lane);
  ++lane.releases;
  Device::get().learned(lane).show(all, ptx::kNetwork);
}
