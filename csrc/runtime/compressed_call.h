// A collective whose data travels as codes, whatever carries it out.
#pragma once

#include <memory>
#include <string>

#include "runtime/codec_request.h"
#include "runtime/composite_call.h"

namespace pycoll {

class CompressedCall : public CompositeCall {
 public:
  // The `number`th such call of its group, to whose ranks it is announced.
  void start(uint32_t number, Communicator& group);
  const CallHeader& announced() const { return announced_; }
  uint64_t sequence() const override { return announced_.sequence; }
  bool in_conflict(const Touched& touched) const;
  std::string describe() const override;

 protected:
  CompressedCall(CodecRequest request, int rank, std::shared_ptr<CallHome> home);
  const CodecRequest& request() const { return request_; }

 private:
  CodecRequest request_;
  CallHeader announced_;
};

}  // namespace pycoll
