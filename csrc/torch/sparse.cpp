#include "torch/sparse.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/_unique.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

#include <array>

#include "python/gil.h"
#include "torch/errors.h"

namespace pycoll::torch_adapter {
namespace {

constexpr auto kTitle = "pycoll:all_reduce";
constexpr size_t kMostDims = 16;

// What a rank has, as it tells the others.
struct Shape {
  int64_t dtype = 0;
  int64_t sparse_dims = 0;
  int64_t entries = 0;  // may differ
  int64_t dims = 0;
  std::array<int64_t, kMostDims> sizes{};
};
constexpr size_t kShapeWords = sizeof(Shape) / sizeof(int64_t);

Shape shape_of(const at::Tensor& tensor) {
  Shape shape;
  shape.dtype = static_cast<int64_t>(tensor.scalar_type());
  shape.sparse_dims = tensor.sparse_dim();
  shape.entries = tensor._nnz();
  shape.dims = tensor.dim();
  std::copy(tensor.sizes().begin(), tensor.sizes().end(), shape.sizes.begin());
  return shape;
}

std::string words_for(const Shape& shape) {
  const at::IntArrayRef sizes(shape.sizes.data(), static_cast<size_t>(shape.dims));
  return concat("a sparse tensor of shape ", sizes, ", ", shape.sparse_dims,
                " sparse dimensions and type ",
                c10::toString(static_cast<c10::ScalarType>(shape.dtype)));
}

bool fit(const Shape& a, const Shape& b) {
  return a.dtype == b.dtype && a.sparse_dims == b.sparse_dims && a.dims == b.dims &&
         a.sizes == b.sizes;
}

// Every rank's elements, one after the other along `dim`, which has so many for each rank.
at::Tensor gather(Communicator& group, const at::Tensor& mine, int64_t dim,
                  const std::vector<int64_t>& lengths, Nanoseconds timeout) {
  CallRequest request;
  request.collective = Collective::all_gather;
  request.timeout = timeout;
  const at::Tensor dense = mine.contiguous();
  const auto bytes_of = [](const at::Tensor& tensor) -> Block {
    return {static_cast<std::byte*>(tensor.data_ptr()), static_cast<uint64_t>(tensor.nbytes())};
  };
  request.input.blocks.push_back(bytes_of(dense));
  std::vector<at::Tensor> parts;
  for (const int64_t length : lengths) {
    std::vector<int64_t> sizes = mine.sizes().vec();
    sizes[static_cast<size_t>(dim)] = length;
    parts.push_back(at::empty(sizes, mine.options()));
    request.output.blocks.push_back(bytes_of(parts.back()));
  }
  group.run(std::move(request), nullptr);
  return at::cat(parts, dim);
}

std::vector<Shape> exchange(Communicator& group, const Shape& mine, Nanoseconds timeout) {
  std::vector<Shape> all(static_cast<size_t>(group.world_size()));
  Shape own = mine;
  CallRequest request;
  request.collective = Collective::all_gather;
  request.dtype = DType::int64;
  request.timeout = timeout;
  request.input.blocks.push_back({reinterpret_cast<std::byte*>(&own), kShapeWords});
  for (Shape& one : all) {
    request.output.blocks.push_back({reinterpret_cast<std::byte*>(&one), kShapeWords});
  }
  group.run(std::move(request), nullptr);
  return all;
}

// One number an index: its place among all there could be.
at::Tensor places(const at::Tensor& indices, at::IntArrayRef sizes) {
  at::Tensor flat = at::zeros({indices.size(1)}, indices.options());
  for (int64_t dim = 0; dim < indices.size(0); ++dim) {
    flat.mul_(sizes[static_cast<size_t>(dim)]).add_(indices[dim]);
  }
  return flat;
}

// Of what all ranks have, one rank's `entries` after the other's; each rank's indices are distinct.
// In float32 where the type is narrower, rounded once.
//
// Not with coalesce(): its sort is not stable, and orders equal indices by what vector instructions
// the CPU has, so ranks on different ones would get different bits.
at::Tensor sum(const at::Tensor& indices, const at::Tensor& values,
               const std::vector<int64_t>& entries, const at::Tensor& like, ReduceOp op) {
  const auto type = like.scalar_type();
  const bool narrow = type == at::kHalf || type == at::kBFloat16;
  const at::Tensor wide = narrow ? values.to(at::kFloat) : values;
  const auto [distinct, slots] = at::_unique(places(indices, like.sizes()), true, true);
  std::vector<int64_t> sizes = wide.sizes().vec();
  sizes[0] = distinct.size(0);
  at::Tensor sums = at::zeros(sizes, wide.options());
  int64_t start = 0;
  for (const int64_t length : entries) {
    sums.index_add_(0, slots.narrow(0, start, length), wide.narrow(0, start, length));
    start += length;
  }
  const auto ranks = static_cast<int64_t>(entries.size());
  if (op == ReduceOp::avg && c10::isIntegralType(type, /*includeBool=*/true)) {
    sums.div_(ranks, "trunc");
  } else if (op == ReduceOp::avg) {
    sums.div_(ranks);
  }
  // Of entries with the same index any will do.
  at::Tensor entry = at::empty_like(distinct);
  entry.scatter_(0, slots, at::arange(slots.size(0), slots.options()));
  return at::_sparse_coo_tensor_unsafe(indices.index_select(1, entry), sums.to(type), like.sizes(),
                                       like.options(), /*is_coalesced=*/true);
}

}  // namespace

class SparseWork final : public c10d::Work {
 public:
  SparseWork(Description description, ReduceOp op, Nanoseconds timeout)
      : c10d::Work(description.rank, description.type, description.title, description.inputs),
        tensor_(description.outputs[0]),
        mine_(tensor_.coalesce()),
        op_(op),
        timeout_(timeout),
        future_(c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()))) {}

  Tensors result() override { return {tensor_}; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  bool isCompleted() override { return future_->completed(); }
  bool isSuccess() const override { return future_->hasValue(); }
  std::exception_ptr exception() const override {
    return future_->hasError() ? future_->exception_ptr() : nullptr;
  }
  void synchronize() override { wait(); }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    const GilRelease release;
    if (timeout != kNoTimeout && !c10d::Work::wait(timeout)) return false;
    future_->waitAndThrow();
    return true;
  }

  void run(Communicator& group) {
    const at::AutoDispatchBelowAutograd no_autograd;
    const Shape own = shape_of(mine_);
    const std::vector<Shape> all = exchange(group, own, timeout_);
    std::vector<int64_t> entries;
    for (size_t peer = 0; peer < all.size(); ++peer) {
      if (!fit(own, all[peer])) {
        fail(ErrorKind::mismatch, kTitle, ": rank ", group.rank(), " has ", words_for(own),
             ", rank ", peer, " ", words_for(all[peer]), ". They must be the same on every rank");
      }
      entries.push_back(all[peer].entries);
    }
    const at::Tensor indices = gather(group, mine_._indices(), 1, entries, timeout_);
    const at::Tensor values = gather(group, mine_._values(), 0, entries, timeout_);
    const at::Tensor result = sum(indices, values, entries, mine_, op_);
    // Elsewhere an inference tensor refuses it; what is made in there is one.
    const c10::InferenceMode same_kind(tensor_.is_inference());
    tensor_.copy_(result);
  }

  void end(const std::exception_ptr& error) {
    finish(error);
    if (error) {
      future_->setError(error);
    } else {
      future_->markCompleted(c10::IValue(Tensors{tensor_}));
    }
  }

 private:
  at::Tensor tensor_;
  const at::Tensor mine_;  // as it was when the call was made
  const ReduceOp op_;
  const Nanoseconds timeout_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

c10::intrusive_ptr<c10d::Work> SparseCalls::all_reduce(Description description, ReduceOp op,
                                                       Nanoseconds timeout) {
  const at::Tensor& tensor = description.outputs[0];
  if (op != ReduceOp::sum && op != ReduceOp::avg) {
    refuse(kTitle, "sparse tensors have SUM and AVG, not ", name_of(op));
  }
  if (tensor.dim() > static_cast<int64_t>(kMostDims)) {
    refuse(kTitle, "a sparse tensor of ", tensor.dim(), " dimensions; the most is ", kMostDims);
  }
  const GilRelease release;
  with_torch_errors([&] { start(); });
  auto work = c10::make_intrusive<SparseWork>(std::move(description), op, timeout);
  {
    const std::lock_guard lock(mutex_);
    if (closed_) refuse(kTitle, "the group was destroyed");
    queue_.push_back([this, work] { carry_out(*work); });
  }
  news_.notify_one();
  return work;
}

void SparseCalls::start() {
  {
    const std::lock_guard lock(mutex_);
    if (group_) return;
  }
  auto group = control_->split(0, interrupt_);
  const std::lock_guard lock(mutex_);
  group_ = std::move(group);
  thread_ = std::thread([this] { loop(); });
}

void SparseCalls::carry_out(SparseWork& work) {
  std::exception_ptr error;
  try {
    work.run(*group_);
  } catch (const std::exception& caught) {
    // Whatever it is, of torch too (no memory): the group itself is told, since its ranks are out
    // of step, whatever they do next.
    control_->abort(caught.what());
    error = as_torch_error(std::current_exception());
  }
  work.end(error);
}

void SparseCalls::loop() {
  std::unique_lock lock(mutex_);
  for (;;) {
    news_.wait(lock, [this] { return closed_ || !queue_.empty(); });
    if (queue_.empty()) return;
    std::function<void()> call = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    call();
    call = nullptr;  // what it holds may need the lock, or the GIL
    lock.lock();
  }
}

void SparseCalls::abort(const std::string& reason) {
  const std::lock_guard lock(mutex_);
  if (group_) group_->abort(reason);
}

void SparseCalls::close() {
  std::shared_ptr<Communicator> group;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    group = group_;
  }
  news_.notify_all();
  if (group) group->close();
  if (thread_.joinable()) thread_.join();
}

}  // namespace pycoll::torch_adapter
