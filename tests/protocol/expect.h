// Expectations of test programs: the first that fails prints a message and ends the program with status 1.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <string>
#include <vector>

using Log = std::vector<std::string>;

// A call in words and numbers, for a log of calls.
inline std::string text(const std::string& what, std::initializer_list<int64_t> numbers) {
  std::string all = what;
  for (const int64_t n : numbers) all += " " + std::to_string(n);
  return all;
}

inline void expect(bool holds, const std::string& what) {
  if (holds) return;
  std::printf("%s\n", what.c_str());
  std::exit(1);
}

inline void expect(const Log& got, const Log& wanted, const std::string& what) {
  if (got == wanted) return;
  std::printf("%s: got\n", what.c_str());
  for (const std::string& line : got) std::printf("  %s\n", line.c_str());
  std::printf("expected\n");
  for (const std::string& line : wanted) std::printf("  %s\n", line.c_str());
  std::exit(1);
}
