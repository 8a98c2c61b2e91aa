// Lets a library that was built on a new Linux load into an older one: newer C libraries have moved
// these symbols to newer versions, and the static C++ library asks for them. The functions that they
// stand for are as old as threads.
#if defined(__linux__) && (defined(__x86_64__) || defined(__aarch64__))
#include <features.h>
#if defined(__GLIBC__)

#if defined(__x86_64__)
#define ONNXTRAIN_OLDEST "GLIBC_2.2.5"
#else
#define ONNXTRAIN_OLDEST "GLIBC_2.17"
#endif
#define ONNXTRAIN_HIDDEN __attribute__((visibility("hidden")))

__asm__(".symver onnxtrain_old_once, pthread_once@" ONNXTRAIN_OLDEST);
__asm__(".symver onnxtrain_old_key_create, __pthread_key_create@" ONNXTRAIN_OLDEST);

extern "C" {
int onnxtrain_old_once(int* control, void (*routine)());
int onnxtrain_old_key_create(unsigned* key, void (*destructor)(void*));

ONNXTRAIN_HIDDEN int pthread_once(int* control, void (*routine)()) { return onnxtrain_old_once(control, routine); }
ONNXTRAIN_HIDDEN int __pthread_key_create(unsigned* key, void (*destructor)(void*)) {
  return onnxtrain_old_key_create(key, destructor);
}
// A hint only: counts of references are changed atomically even while there is one thread.
ONNXTRAIN_HIDDEN char __libc_single_threaded = 0;
}

#endif
#endif
