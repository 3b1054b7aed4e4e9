// A library to preload that keeps gloo's threads busy for half a second after they have reported an operation's end, as
// if they had lost their core: they keep its tensors that long.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>
#include <time.h>

int pthread_cond_broadcast(pthread_cond_t* condition) {
  int (*real)(pthread_cond_t*) = (int (*)(pthread_cond_t*))dlsym(RTLD_NEXT, "pthread_cond_broadcast");
  int status = real(condition);
  char name[16] = "";
  pthread_getname_np(pthread_self(), name, sizeof name);
  if (strcmp(name, "pt_gloo_runloop") == 0) {
    struct timespec start, now;
    clock_gettime(CLOCK_MONOTONIC, &start);
    do {
      clock_gettime(CLOCK_MONOTONIC, &now);
    } while ((double)(now.tv_sec - start.tv_sec) + 1e-9 * (double)(now.tv_nsec - start.tv_nsec) < 0.5);
  }
  return status;
}
