// A fuzz input as a stream of integers, followed by zeros.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace moe_rt::fuzz {

class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : data_(data), size_(size) {}

  bool empty() const { return at_ >= size_; }
  template <class T>
  T take() {
    T value{};
    const size_t left = size_ - at_, n = sizeof(T) < left ? sizeof(T) : left;
    if (n > 0) std::memcpy(&value, data_ + at_, n);
    at_ += n;
    return value;
  }
  // Take one byte as a value in [lowest, highest], which are at most 255 apart.
  int between(int lowest, int highest) { return lowest + take<uint8_t>() % (highest - lowest + 1); }

 private:
  const uint8_t* data_;
  size_t size_, at_ = 0;
};

inline void expect(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "fuzz: %s\n", what);
  std::abort();
}

}  // namespace moe_rt::fuzz
