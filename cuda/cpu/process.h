// Detection of a peer process's end, as early as the kernel reports it, through its open /proc/<pid>/stat.
//
// A killed process first frees its memory, which takes a second for some ten GiB; only then is it a zombie and its
// pidfd readable. Its threads' flags report the end before that. The descriptor always refers to that process: once it
// has exited, reading fails, even if another process has its id.
#pragma once

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace moe_rt {

// Contents of the stat file of a thread, or of a process and its first thread.
struct ProcStat {
  long pid = 0;
  char state = 0;     // state letter of proc_pid_stat(5); X once it has exited; 0 if it cannot be read
  bool ends = false;  // the thread runs no more code of the program
  long num_threads = 0;
};

// Reads a stat file. An exited thread or process has ends = true and no threads; an unreadable one counts as alive
// until it can be read.
inline ProcStat read_stat(int descriptor) {
  // PF_EXITING, PF_POSTCOREDUMP, PF_DUMPCORE of linux/sched.h: it exits, waits for a core dump of all, or writes that.
  constexpr unsigned long kEnds = 0x4 | 0x8 | 0x200;
  ProcStat stat;
  char text[1024];
  const ssize_t bytes = pread(descriptor, text, sizeof(text) - 1, 0);
  if (bytes <= 0) {
    stat.ends = bytes == 0 || errno == ESRCH;
    if (stat.ends) stat.state = 'X';
    return stat;
  }
  text[bytes] = '\0';
  stat.pid = std::strtol(text, nullptr, 10);
  const char* const name_end = std::strrchr(text, ')');  // the name may hold blanks and parentheses
  unsigned long flags = 0;
  // Fields following the name: state, five ids, flags, faults and times, priorities, number of threads; see
  // proc_pid_stat(5).
  const char* const fields = " %c %*d %*d %*d %*d %*d %lu %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %ld";
  if (name_end) std::sscanf(name_end + 1, fields, &stat.state, &flags, &stat.num_threads);
  stat.ends = (flags & kEnds) != 0 || stat.state == 'Z' || stat.state == 'X';
  return stat;
}

inline bool thread_ends(int tasks, const char* tid) {
  char path[32];
  std::snprintf(path, sizeof(path), "%.20s/stat", tid);
  const int descriptor = openat(tasks, path, O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return errno == ENOENT;  // exited since it was listed
  const bool ends = read_stat(descriptor).ends;
  close(descriptor);
  return ends;
}

inline bool all_threads_end(long pid) {
  char path[32];
  std::snprintf(path, sizeof(path), "/proc/%ld/task", pid);
  DIR* const tasks = opendir(path);
  if (!tasks) return false;  // exited, as the next read will show, or no descriptor is left
  bool all = true;
  for (const dirent* entry = readdir(tasks); all && entry; entry = readdir(tasks)) {
    all = entry->d_name[0] == '.' || thread_ends(dirfd(tasks), entry->d_name);
  }
  closedir(tasks);
  return all;
}

// True if the process of `descriptor`, an open /proc/<pid>/stat, has ended; false if it is negative. Takes about 2 us.
// The first thread may have ended by pthread_exit while the process lives on, so once it ends the other threads are
// checked.
inline bool has_ended(int descriptor) {
  if (descriptor < 0) return false;
  const ProcStat stat = read_stat(descriptor);
  return stat.ends && (stat.num_threads <= 1 || all_threads_end(stat.pid));
}

}  // namespace moe_rt
