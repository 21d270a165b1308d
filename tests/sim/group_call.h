// One call of a group on this rank, with its vectors in memory of the device.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "device_call.h"
#include "group_world.h"
#include "native/random.h"
#include "scenario.h"
#include "transport/cuda_ipc/runtime_api.h"

namespace pycoll::sim::tests {

using stress::Rng;

void ok(cudaError_t error, const char* what);

// Memory on the device that is the image of a buffer of the host, a few bytes around it.
class OnDevice {
 public:
  // `inside`: a part of that memory, which is the caller's; nullptr: memory of its own.
  explicit OnDevice(Buffer& host, size_t offset, std::byte* inside = nullptr)
      : host_(host), offset_(kGuard + offset % 16), owned_(inside == nullptr), base_(inside) {
    void* memory = inside;
    if (owned_) ok(cudaMalloc(&memory, bytes_for(host) + offset_), "cudaMalloc");
    base_ = static_cast<std::byte*>(memory);
    ok(cudaMemset(base_, static_cast<int>(kAround), host.size() + offset_ + kGuard), "cudaMemset");
    upload();
  }
  ~OnDevice() {
    if (owned_) cudaFree(base_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  // At most, with what is around it.
  static size_t bytes_for(const Buffer& host) { return host.size() + 2 * kGuard + 256; }

  void upload() {
    ok(cudaMemcpy(base_ + offset_, host_.data(), host_.size(), cudaMemcpyHostToDevice), "upload");
    ok(cudaDeviceSynchronize(), "upload");
  }
  // Throws if the bytes before or behind changed.
  void download(const std::string& what) {
    Bytes all(host_.size() + offset_ + kGuard);
    ok(cudaMemcpy(all.data(), base_, all.size(), cudaMemcpyDeviceToHost), "download");
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(offset_);
    const auto end = begin + static_cast<std::ptrdiff_t>(host_.size());
    for (auto at = all.begin(); at != all.end(); at = at + 1 == begin ? end : at + 1) {
      check(*at == kAround, what + ": memory around a vector of " + std::to_string(host_.size()) +
                                " bytes was written, at byte " + std::to_string(at - begin));
    }
    host_.fill(Bytes(begin, end));
  }
  // An empty block may lie at the end, where another buffer may begin.
  bool holds(const void* p, size_t bytes) const {
    const auto* at = static_cast<const std::byte*>(p);
    return at >= host_.data() && at + bytes <= host_.data() + host_.size();
  }
  std::byte* image_of(const void* p) const {
    return base_ + offset_ + (static_cast<const std::byte*>(p) - host_.data());
  }

 private:
  static constexpr size_t kGuard = 64;
  static constexpr std::byte kAround{0x5a};
  Buffer& host_;
  size_t offset_;
  bool owned_;
  std::byte* base_ = nullptr;
};

// One call on this rank.
class OneCall {
 public:
  // `inside`: memory of the caller for the input (or both, in place), and for the output.
  OneCall(const CallShape& shape, const GroupRank& rank, std::array<std::byte*, 2> inside = {})
      : rank_(rank.rank), data_(shape, rank.ranks) {
    size_t place = 0;
    for (Buffer* buffer : data_.buffers(rank_)) {
      const size_t offset = shape.offset * size_of(shape.dtype);
      vectors_.push_back(std::make_unique<OnDevice>(*buffer, offset, inside[place++]));
    }
  }

  CallRequest request() const {
    CallRequest request;
    const CallShape& shape = data_.shape();
    request.collective = shape.collective;
    request.dtype = shape.dtype;
    request.reduce_op = traits_of(shape.collective).reduces ? shape.op : ReduceOp::none;
    request.root = shape.root;
    request.input = view_of(data_.input(rank_));
    request.output = view_of(data_.output(rank_));
    return request;
  }
  // New contents for another run of the same call.
  void renew() {
    data_.renew();
    for (const auto& vector : vectors_) vector->upload();
  }
  void check(const std::string& what) {
    for (const auto& vector : vectors_) vector->download(what + ", " + data_.shape().describe());
    data_.check_rank(rank_, what);
  }

 private:
  VectorView view_of(const cuda::Vector& vector) const {
    const size_t size = size_of(data_.shape().dtype);
    VectorView view;
    for (int32_t i = 0; i < vector.blocks; ++i) {
      for (const auto& candidate : vectors_) {
        if (!candidate->holds(vector.block[i], vector.count[i] * size)) continue;
        view.blocks.push_back({candidate->image_of(vector.block[i]), vector.count[i]});
        break;
      }
    }
    return view;
  }

  int rank_;
  CallData data_;
  std::vector<std::unique_ptr<OnDevice>> vectors_;
};

uint64_t draw_count(Rng& rng);
// Of any collective, type and operation that there is, but a barrier.
CallShape draw_call(Rng& rng, int ranks);
cudaStream_t new_stream();
// Until the device is idle or the group has an error.
void wait_for_device(GroupRank& rank, cudaStream_t stream);

}  // namespace pycoll::sim::tests
