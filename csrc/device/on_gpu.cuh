// device.cuh under nvcc. PTX by name and not cuda::atomic_ref: that one asks at run time whether an
// address is local before each access, and a reader of the assembly should find exactly what was
// written here.
#pragma once

#define PYCOLL_DEVICE __device__ __forceinline__
#define PYCOLL_SHARED(T, name, n) __shared__ T name[n]
#define PYCOLL_DYNAMIC_SHARED(T, name)                            \
  extern __shared__ __align__(16) unsigned char pycoll_dynamic[]; \
  T* const name = reinterpret_cast<T*>(pycoll_dynamic)

namespace pycoll::device {

// One access: `op` is "ld.acquire" and the like. The "memory" clobber keeps the compiler from
// moving other accesses across it.
#define PYCOLL_PTX_LOAD(op, scope, bits, constraint, p, result) \
  asm volatile(op "." scope ".b" #bits " %0, [%1];" : "=" constraint(result) : "l"(p) : "memory")
#define PYCOLL_PTX_STORE(op, scope, bits, constraint, p, value) \
  asm volatile(op "." scope ".b" #bits " [%0], %1;" ::"l"(p), constraint(value) : "memory")
#define PYCOLL_PTX_UPDATE(op, scope, type, constraint, p, value, result) \
  asm volatile("atom." op "." scope type " %0, [%1], %2;"                \
               : "=" constraint(result)                                  \
               : "l"(p), constraint(value)                               \
               : "memory")

// Of 32 and 64 bits, of the three scopes.
#define PYCOLL_BY_SIZE_AND_SCOPE(macro, S, T, op, ...)                        \
  static_assert(std::is_unsigned_v<T> && (sizeof(T) == 4 || sizeof(T) == 8)); \
  if constexpr (sizeof(T) == 4) {                                             \
    if constexpr (S == Scope::block) macro(op, "cta", 32, "r", __VA_ARGS__);  \
    if constexpr (S == Scope::device) macro(op, "gpu", 32, "r", __VA_ARGS__); \
    if constexpr (S == Scope::system) macro(op, "sys", 32, "r", __VA_ARGS__); \
  } else {                                                                    \
    if constexpr (S == Scope::block) macro(op, "cta", 64, "l", __VA_ARGS__);  \
    if constexpr (S == Scope::device) macro(op, "gpu", 64, "l", __VA_ARGS__); \
    if constexpr (S == Scope::system) macro(op, "sys", 64, "l", __VA_ARGS__); \
  }
#define PYCOLL_PTX_ADD(op, scope, bits, constraint, p, value, result) \
  PYCOLL_PTX_UPDATE(op, scope, ".add.u" #bits, constraint, p, value, result)
#define PYCOLL_PTX_OR(op, scope, bits, constraint, p, value, result) \
  PYCOLL_PTX_UPDATE(op, scope, ".or.b" #bits, constraint, p, value, result)
#define PYCOLL_PTX_MAX(op, scope, bits, constraint, p, value, result) \
  PYCOLL_PTX_UPDATE(op, scope, ".max.u" #bits, constraint, p, value, result)

template <Scope S, class T>
PYCOLL_DEVICE T load_acquire(T* p) {
  T result;
  PYCOLL_BY_SIZE_AND_SCOPE(PYCOLL_PTX_LOAD, S, T, "ld.acquire", p, result)
  return result;
}

template <Scope S, class T>
PYCOLL_DEVICE T load_relaxed(T* p) {
  T result;
  PYCOLL_BY_SIZE_AND_SCOPE(PYCOLL_PTX_LOAD, S, T, "ld.relaxed", p, result)
  return result;
}

template <Scope S, class T>
PYCOLL_DEVICE void store_release(T* p, std::type_identity_t<T> value) {
  PYCOLL_BY_SIZE_AND_SCOPE(PYCOLL_PTX_STORE, S, T, "st.release", p, value)
}

template <Scope S, class T>
PYCOLL_DEVICE void store_relaxed(T* p, std::type_identity_t<T> value) {
  PYCOLL_BY_SIZE_AND_SCOPE(PYCOLL_PTX_STORE, S, T, "st.relaxed", p, value)
}

template <Scope S, class T>
PYCOLL_DEVICE T fetch_add_relaxed(T* p, std::type_identity_t<T> value) {
  T result;
  PYCOLL_BY_SIZE_AND_SCOPE(PYCOLL_PTX_ADD, S, T, "relaxed", p, value, result)
  return result;
}

template <Scope S, class T>
PYCOLL_DEVICE T fetch_add_acq_rel(T* p, std::type_identity_t<T> value) {
  T result;
  PYCOLL_BY_SIZE_AND_SCOPE(PYCOLL_PTX_ADD, S, T, "acq_rel", p, value, result)
  return result;
}

template <Scope S, class T>
PYCOLL_DEVICE T fetch_or_relaxed(T* p, std::type_identity_t<T> value) {
  T result;
  PYCOLL_BY_SIZE_AND_SCOPE(PYCOLL_PTX_OR, S, T, "relaxed", p, value, result)
  return result;
}

template <Scope S, class T>
PYCOLL_DEVICE T fetch_max_relaxed(T* p, std::type_identity_t<T> value) {
  T result;
  PYCOLL_BY_SIZE_AND_SCOPE(PYCOLL_PTX_MAX, S, T, "relaxed", p, value, result)
  return result;
}

#undef PYCOLL_PTX_LOAD
#undef PYCOLL_PTX_STORE
#undef PYCOLL_PTX_UPDATE
#undef PYCOLL_PTX_ADD
#undef PYCOLL_PTX_OR
#undef PYCOLL_PTX_MAX
#undef PYCOLL_BY_SIZE_AND_SCOPE

// Long enough that polling leaves the memory system alone, short beside a trip over NVLink.
PYCOLL_DEVICE void spin_pause() {
  __nanosleep(20);
}

PYCOLL_DEVICE uint64_t timer_ns() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// For reports of the simulator.
struct Caller {
  PYCOLL_DEVICE static constexpr Caller here() { return {}; }
};

PYCOLL_DEVICE void load_16_bytes(const void* from, void* to, Caller) {
  *static_cast<uint4*>(to) = *static_cast<const uint4*>(from);
}

PYCOLL_DEVICE void store_16_bytes(void* to, const void* from, Caller) {
  *static_cast<uint4*>(to) = *static_cast<const uint4*>(from);
}

}  // namespace pycoll::device
