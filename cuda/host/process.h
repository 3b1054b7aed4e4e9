// Whether the process of a peer has ended, told as early as the kernel tells: by its open /proc/<pid>/stat.
//
// A process that is killed gives back its memory first, which takes a second for some ten GiB; only then is it a zombie
// and its pidfd readable. The flags of its threads tell before that. The descriptor belongs to that one process for
// ever: once it is gone reading fails, also if another has got its id.
#pragma once

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace moe_rt {

// What a stat file says of a thread, or of a process and its first thread.
struct ProcStat {
  long pid = 0;
  char state = 0;     // the letter of proc_pid_stat(5); X once it is gone; 0 where it cannot be read
  bool ends = false;  // that thread runs no more code of the program
  long num_threads = 0;
};

// A thread or process that is gone ends and has no threads; one that cannot be read is taken to live until it can be.
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
  // After the name: state, five ids, flags, faults and times, priorities, number of threads; see proc_pid_stat(5).
  const char* const fields = " %c %*d %*d %*d %*d %*d %lu %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %ld";
  if (name_end) std::sscanf(name_end + 1, fields, &stat.state, &flags, &stat.num_threads);
  stat.ends = (flags & kEnds) != 0 || stat.state == 'Z' || stat.state == 'X';
  return stat;
}

inline bool thread_ends(int tasks, const char* tid) {
  char path[32];
  std::snprintf(path, sizeof(path), "%.20s/stat", tid);
  const int descriptor = openat(tasks, path, O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return errno == ENOENT;  // gone since it was listed
  const bool ends = read_stat(descriptor).ends;
  close(descriptor);
  return ends;
}

inline bool all_threads_end(long pid) {
  char path[32];
  std::snprintf(path, sizeof(path), "/proc/%ld/task", pid);
  DIR* const tasks = opendir(path);
  if (!tasks) return false;  // gone, as the next look will tell, or no descriptor is left
  bool all = true;
  for (const dirent* entry = readdir(tasks); all && entry; entry = readdir(tasks)) {
    all = entry->d_name[0] == '.' || thread_ends(dirfd(tasks), entry->d_name);
  }
  closedir(tasks);
  return all;
}

// `descriptor` is an open /proc/<pid>/stat; never if it is negative. About 2 us. The first thread may have ended alone,
// by pthread_exit, and then the process lives on: so once it ends, the others are asked.
inline bool has_ended(int descriptor) {
  if (descriptor < 0) return false;
  const ProcStat stat = read_stat(descriptor);
  return stat.ends && (stat.num_threads <= 1 || all_threads_end(stat.pid));
}

}  // namespace moe_rt
