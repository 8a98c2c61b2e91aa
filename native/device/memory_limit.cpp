#include "memory_limit.h"

#include <mutex>

#include "text.h"

namespace onnxtrain {

struct OrtArenaCfg;

constexpr int kCreateEnv = 3, kReleaseEnv = 92, kCreateAndRegisterAllocator = 144, kReleaseArenaCfg = 157,
              kCreateArenaCfgV2 = 164;
using CreateEnvFunction = OrtStatus*(int, const char*, OrtEnv**);
using ReleaseEnvFunction = void(OrtEnv*);
using CreateAndRegisterAllocatorFunction = OrtStatus*(OrtEnv*, const OrtMemoryInfo*, const OrtArenaCfg*);
using ReleaseArenaCfgFunction = void(OrtArenaCfg*);
using CreateArenaCfgV2Function = OrtStatus*(const char* const*, const size_t*, size_t, OrtArenaCfg**);

}  // namespace onnxtrain

namespace onnxtrain::device {

namespace {

std::mutex guard;
uint64_t present_limit = 0;

}  // namespace

Held<OrtEnv> new_env(const RuntimePointer& runtime) {
  constexpr int kWarnings = 2;
  OrtEnv* made = nullptr;
  runtime->check(ONNXTRAIN_CALL(runtime->api, CreateEnv)(kWarnings, "onnxtrain", &made));
  const auto release = ONNXTRAIN_CALL(runtime->api, ReleaseEnv);
  return Held<OrtEnv>(made, [runtime, release](OrtEnv* last) { release(last); });
}

void limit_memory(const RuntimePointer& runtime, uint64_t bytes) {
  const std::lock_guard<std::mutex> lock(guard);
  if (present_limit == bytes) return;
  if (present_limit != 0) {
    throw StateError("this process has a limit of " + with_commas(present_limit) +
                     " bytes already, and onnxruntime keeps it: pass the same memory_limit, or none");
  }
  // Free pieces are cut, and memory is taken as it is needed: the bound is that of what is in use.
  const char* keys[] = {"max_mem", "arena_extend_strategy", "max_dead_bytes_per_chunk"};
  const size_t values[] = {static_cast<size_t>(bytes), 1, size_t{1} << 18};
  OrtArenaCfg* made = nullptr;
  runtime->check(ONNXTRAIN_CALL(runtime->api, CreateArenaCfgV2)(keys, values, 3, &made));
  const Held<OrtArenaCfg> settings(made, ONNXTRAIN_CALL(runtime->api, ReleaseArenaCfg));
  // The allocator lives as long as the environment, which is never released from here on.
  static Held<OrtEnv>* const kept = new Held<OrtEnv>(new_env(runtime));
  const auto add = ONNXTRAIN_CALL(runtime->api, CreateAndRegisterAllocator);
  runtime->check(add(kept->get(), runtime->memory, settings.get()));
  present_limit = bytes;
}

}  // namespace onnxtrain::device
