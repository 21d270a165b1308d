// Which operations a kind of type has, in words. The tables of kernels must agree (a test
// compares).
#include <cctype>

#include "core/error.h"
#include "kernels/reduce.h"

namespace pycoll {
namespace {

constexpr unsigned bit(ReduceOp op) {
  return 1u << static_cast<unsigned>(op);
}
constexpr unsigned kSums = bit(ReduceOp::sum) | bit(ReduceOp::avg);
constexpr unsigned kOrdered =
    kSums | bit(ReduceOp::product) | bit(ReduceOp::min) | bit(ReduceOp::max);
constexpr unsigned kBitwise = bit(ReduceOp::band) | bit(ReduceOp::bor) | bit(ReduceOp::bxor);
constexpr unsigned kPremulSum = bit(ReduceOp::premul_sum);

struct KindRow {
  DTypeKind kind;
  std::string_view adjective;
  unsigned ops;
};

constexpr KindRow kKinds[] = {
    {DTypeKind::boolean, "boolean", kOrdered | kBitwise},
    {DTypeKind::integer, "integral", kOrdered | kBitwise},
    {DTypeKind::floating, "non-integral", kOrdered | kPremulSum},
    {DTypeKind::complex, "complex", kSums | kPremulSum},
    {DTypeKind::opaque, "move-only", 0},
};

constexpr bool rows_match_enum() {
  size_t i = 0;
  for (const KindRow& row : kKinds) {
    if (static_cast<size_t>(row.kind) != i++) return false;
  }
  return i == static_cast<size_t>(DTypeKind::kCount);
}
static_assert(rows_match_enum(), "kKinds must list the kinds in the order of the enum");

// As torch.distributed.ReduceOp spells it.
std::string upper(std::string_view name) {
  std::string result(name);
  for (char& c : result) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return result;
}

std::string names_of(unsigned ops) {
  std::string names;
  for (unsigned i = 0; i < static_cast<unsigned>(ReduceOp::kCount); ++i) {
    const auto op = static_cast<ReduceOp>(i);
    if ((ops & bit(op)) == 0) continue;
    if (!names.empty()) names += ", ";
    names += upper(name_of(op));
  }
  return names;
}

}  // namespace

std::string why_not_reducible(DType dtype, ReduceOp op) {
  const KindRow& row = kKinds[static_cast<size_t>(dtype_info(dtype).kind)];
  if ((row.ops & bit(op)) != 0) return {};
  if (op == ReduceOp::none) return "No reduce operation was given";
  return concat("Cannot use ", upper(name_of(op)), " with ", row.adjective, " dtype ",
                name_of(dtype),
                row.ops == 0 ? std::string(": it can be sent but not reduced")
                             : concat("; defined are ", names_of(row.ops)));
}

}  // namespace pycoll
