// One writer and one reader of an op record slot: `op_record_slot mixtures` looks for reads that mix two ops,
// `op_record_slot cost` measures the cost of an op's four writes.
//
// Every field of the n-th op record is n, so a mixture is visible. Exit status 0: no mixture was taken for a record.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>

#include "../../cuda/cpu/recording.h"

using namespace moe_rt;
using Clock = std::chrono::steady_clock;

namespace {

constexpr auto kLimit = std::chrono::seconds(60);
constexpr int kEnough = 100'000;  // reads of either outcome

OpRecordWords words_of(uint64_t n) {
  OpRecordWords words;
  words.fill(n);
  return words;
}

int look_for_mixtures() {
  OpRecordSlot slot{};
  uint32_t done = 0;
  std::thread writer([&] {
    const auto start = Clock::now();
    uint64_t n = 0;
    for (bool stop = false; !stop; stop = load_relaxed(done) != 0 || Clock::now() - start > kLimit) {
      for (int i = 0; i < 1000; ++i) write_op_record(slot, std::bit_cast<OpRecord>(words_of(++n)));
    }
  });
  long whole = 0, torn = 0, mixed = 0;
  const auto start = Clock::now();
  while ((whole < kEnough || torn < kEnough) && Clock::now() - start < kLimit) {
    OpRecord op_record;
    if (!read_op_record(slot, op_record)) {
      ++torn;
    } else {
      ++whole;
      mixed += std::bit_cast<OpRecordWords>(op_record) != words_of(op_record.number);
    }
  }
  store_relaxed(done, 1u);
  writer.join();
  std::printf("%ld whole, %ld torn, %ld mixed\n", whole, torn, mixed);
  return whole < kEnough || torn < kEnough || mixed > 0;
}

int measure() {
  static OpRecordSlot ring[kNumOpRecords];
  constexpr int kOps = 10'000, kBatches = 50;
  OpRecord op_record{};
  double best = 1e9;
  for (int batch = 0; batch < kBatches; ++batch) {
    const auto start = Clock::now();
    for (int op = 0; op < kOps; ++op) {
      ++op_record.number;
      for (int64_t OpRecord::* step :
           {&OpRecord::start_ns, &OpRecord::announced_ns, &OpRecord::arrived_ns, &OpRecord::end_ns}) {
        op_record.*step = op;
        write_op_record(ring[op_record.number % kNumOpRecords], op_record);
      }
    }
    best = std::min(best, std::chrono::duration<double, std::nano>(Clock::now() - start).count() / kOps);
  }
  std::printf("%.1f ns\n", best);
  return 0;
}

}  // namespace

int main(int, char** argv) { return std::strcmp(argv[1], "cost") == 0 ? measure() : look_for_mixtures(); }
