// Reading a segment that nothing is known of: the plaque is copied and judged first, then what it points at is read.
#include "report.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "recording.h"

namespace moe_rt {

namespace {

constexpr int32_t kMostRanks = 1 << 15;  // fit the poison word
constexpr int kLooks = 1000;             // at a slot that changes; writing it takes far less time

void expect(bool condition, const char* what, int64_t got, const std::string& expected) {
  if (condition) return;
  throw std::invalid_argument(std::string(what) + ": got " + std::to_string(got) + ", expected " + expected);
}

// Pairs with write_plaque.
Plaque read_plaque(const char* segment, int64_t num_bytes) {
  expect(num_bytes >= int64_t{sizeof(Plaque)}, "bytes", num_bytes, "a plaque");
  const auto past_line = static_cast<int64_t>(reinterpret_cast<uintptr_t>(segment) % kLine);
  expect(past_line == 0, "start", past_line, "0 bytes past the start of a line");
  const auto& mapped = *reinterpret_cast<const Plaque*>(segment);
  expect(load_acquire(mapped.magic) == kPlaqueMagic, "magic", int64_t(load_relaxed(mapped.magic)), "a plaque");
  const Plaque p = mapped;
  expect(p.version == kPlaqueVersion, "version", p.version, std::to_string(kPlaqueVersion));
  expect(p.num_ranks > 0 && p.num_ranks < kMostRanks, "ranks", p.num_ranks, "1 to " + std::to_string(kMostRanks - 1));
  expect(p.rank >= 0 && p.rank < p.num_ranks, "rank", p.rank, "one of " + std::to_string(p.num_ranks));
  const auto fits = [num_bytes](const char* what, int64_t at, int64_t size) {
    const bool inside = size <= num_bytes && at >= 0 && at <= num_bytes - size && at % kLine == 0;
    expect(inside, what, at,
           "a line that begins " + std::to_string(size) + " of " + std::to_string(num_bytes) + " bytes");
  };
  fits("poison", p.poison, sizeof(uint64_t));
  fits("mailboxes", p.mailboxes, int64_t{kNumKinds} * p.num_ranks * sizeof(Mailbox));
  fits("members", p.members, int64_t{p.num_ranks} * sizeof(Member));
  fits("flights", p.flights, int64_t{kNumFlights} * sizeof(FlightSlot));
  fits("last words", p.last_words, sizeof(LastWords));
  return p;
}

}  // namespace

SegmentReport read_segment(const char* segment, int64_t num_bytes) {
  SegmentReport report{};
  const Plaque& p = report.plaque = read_plaque(segment, num_bytes);
  report.poison = load_relaxed(*reinterpret_cast<const uint64_t*>(segment + p.poison));

  const auto* mailboxes = reinterpret_cast<const Mailbox*>(segment + p.mailboxes);
  report.said_goodbye.resize(p.num_ranks);
  for (int i = 0; i < kNumKinds * p.num_ranks; ++i) {
    report.announced[i / p.num_ranks].push_back(load_relaxed(mailboxes[i].signal));
    if (load_relaxed(mailboxes[i].goodbye) != 0) report.said_goodbye[i % p.num_ranks] = true;
  }
  const auto* members = reinterpret_cast<const Member*>(segment + p.members);
  report.members.assign(members, members + p.num_ranks);

  report.last_words = read_last_words(*reinterpret_cast<const LastWords*>(segment + p.last_words));
  const auto* slots = reinterpret_cast<const FlightSlot*>(segment + p.flights);
  for (int i = 0; i < kNumFlights; ++i) {
    Flight flight;
    bool whole = false;
    for (int look = 0; look < kLooks && !whole; ++look) whole = read_flight(slots[i], flight);
    if (!whole) {
      ++report.num_torn;
    } else if (flight.number != 0) {
      report.flights.push_back(flight);
    }
  }
  std::sort(report.flights.begin(), report.flights.end(),
            [](const Flight& a, const Flight& b) { return a.number < b.number; });
  return report;
}

}  // namespace moe_rt
