#include "runtime/coded_message.h"

#include <memory>
#include <utility>

#include "runtime/float_mode.h"

namespace pycoll {
namespace {

using Memory = std::shared_ptr<std::byte[]>;

void decode(const Codec& codec, const std::byte* code, DType dtype, const Block& values) {
  const IeeeFloatMode ieee;
  codec_kernels(best_isa()).decode({codec, &code, 1, dtype, values.data, values.count, 1});
}

}  // namespace

void make_code(MessageRequest& request, const Codec& codec, std::byte* code) {
  request.code = {wire_tag(codec), request.dtype, request.block.count};
  request.block = {code, code_bytes(codec, request.block.count)};
  request.dtype = DType::uint8;
}

MessageRequest over_codes(MessageRequest request, const MessageCoding& coding) {
  const Codec& codec = coding.codec;
  const Block values = request.block;
  const DType dtype = request.dtype;
  const uint64_t bytes = code_bytes(codec, values.count);
  const Memory code(new std::byte[bytes]);  // not initialised, which make_shared would do
  if (request.receives) {
    request.finalize = [code, codec, dtype, values, then = std::move(request.finalize)] {
      decode(codec, code.get(), dtype, values);
      if (then) then();
    };
  } else {
    const IeeeFloatMode ieee;
    codec_kernels(best_isa())
        .encode({codec, coding.key, dtype, values.data, values.count, code.get()});
  }
  request.keep_alive =
      std::make_shared<std::pair<std::shared_ptr<void>, Memory>>(request.keep_alive, code);
  make_code(request, codec, code.get());
  return request;
}

}  // namespace pycoll
