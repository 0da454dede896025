// Results of kernels, computed on the host from known bytes: comparisons, logic, sums, copies and counts of integers and booleans.
//
// Programs decide by such values: does the batch have padding, how many tokens are trained, has every answer ended. They follow from
// the batch, which the host copied to the GPU, so they are computed from it. The rules for what is not known:
// - a kernel that is not recognised here, or reads unknown bytes, makes what it writes unknown;
// - an unknown number equals itself and nothing else: `x == x` holds, `x == 0` and `x == inf` do not. So isfinite() is true, and a
//   generated token is never an end token;
// - the number of true values in an unknown mask, which decides how much is allocated, is all of them.
// Layouts are those of torch 2.11 to 2.13 (aten/src/ATen/native/cuda: CUDALoops.cuh, Reduce.cuh, OffsetCalculator.cuh). Each is
// verified before it is used: sizes must multiply to the number of elements and pointers must be the GPU's.
#include "answers.h"
#include "gpu.h"
#include <cxxabi.h>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace standin {
namespace {

using Number = long double;  // its 64 bits of mantissa hold every int64 and every double
constexpr size_t MAX_ELEMENTS = size_t(1) << 20;

enum Type { NO_TYPE, BOOL, INT8, UINT8, INT16, INT32, INT64, FLOAT, DOUBLE };
size_t size_of(Type type) {
  switch (type) {
    case BOOL: case INT8: case UINT8: return 1;
    case INT16: return 2;
    case INT32: case FLOAT: return 4;
    case INT64: case DOUBLE: return 8;
    default: return 0;
  }
}

Number read(Type type, const void* at) {
  switch (type) {
    case BOOL: return *static_cast<const uint8_t*>(at) != 0;
    case INT8: return *static_cast<const int8_t*>(at);
    case UINT8: return *static_cast<const uint8_t*>(at);
    case INT16: return *static_cast<const int16_t*>(at);
    case INT32: return *static_cast<const int32_t*>(at);
    case INT64: return *static_cast<const int64_t*>(at);
    case FLOAT: return *static_cast<const float*>(at);
    case DOUBLE: return *static_cast<const double*>(at);
    default: return 0;
  }
}

void write(Type type, void* at, Number value) {
  switch (type) {
    case BOOL: *static_cast<uint8_t*>(at) = value != 0; break;
    case INT8: *static_cast<int8_t*>(at) = int8_t(value); break;
    case UINT8: *static_cast<uint8_t*>(at) = uint8_t(value); break;
    case INT16: *static_cast<int16_t*>(at) = int16_t(value); break;
    case INT32: *static_cast<int32_t*>(at) = int32_t(value); break;
    case INT64: *static_cast<int64_t*>(at) = int64_t(value); break;
    case FLOAT: *static_cast<float*>(at) = float(value); break;
    case DOUBLE: *static_cast<double*>(at) = double(value); break;
    default: break;
  }
}

Type type_named(std::string name) {
  static const std::unordered_map<std::string, Type> types = {
      {"bool", BOOL}, {"signed char", INT8}, {"unsigned char", UINT8}, {"short", INT16}, {"int", INT32},
      {"long", INT64}, {"float", FLOAT}, {"double", DOUBLE}};
  auto entry = types.find(name);
  return entry == types.end() ? NO_TYPE : entry->second;
}

// Texts between the brackets that open at `open`, split at commas of their own level.
std::vector<std::string> arguments_in(const std::string& text, size_t open) {
  std::vector<std::string> parts;
  if (open == std::string::npos || open >= text.size()) return parts;
  int depth = 0;
  size_t start = open + 1;
  for (size_t at = open; at < text.size(); at++) {
    char c = text[at];
    if (strchr("<({[", c)) depth++;
    bool closes = strchr(">)}]", c);
    if ((c == ',' && depth == 1) || (closes && depth == 1)) {
      size_t first = text.find_first_not_of(' ', start), last = text.find_last_not_of(' ', at - 1);
      if (first < at) parts.push_back(text.substr(first, last - first + 1));
      start = at + 1;
    }
    if (closes && --depth == 0) break;
  }
  return parts;
}

std::vector<std::string> template_arguments(const std::string& text, const char* name) {
  size_t at = text.find(name);
  return at == std::string::npos ? std::vector<std::string>() : arguments_in(text, at + strlen(name) - 1);
}

// --- what one element of the result is, by the functor in the kernel's name

struct Functor {
  int inputs = -1;  // -1: not recognised
  std::vector<Type> input_types;
  Type output_type = NO_TYPE;
  bool is_equality = false;  // has an answer for unknown inputs, too
  // value of an element; `state`: the functor's bytes, `in`: its inputs
  std::function<Number(const char* state, const Number* in)> value;
  std::function<bool(const char* state)> negates = [](const char*) { return false; };
};

size_t aligned(size_t at, Type type) { return (at + size_of(type) - 1) / size_of(type) * size_of(type); }

// `op` of two numbers for AUnaryFunctor, BUnaryFunctor and BinaryFunctor, which hold it and one of them.
Functor with_scalar(const std::string& wrapper, const std::vector<std::string>& types, size_t op_bytes,
                    std::function<Number(const char*, Number, Number)> op) {
  Functor functor;
  if (types.size() < 4) return functor;
  Type first = type_named(types[0]), second = type_named(types[1]);
  functor.output_type = type_named(types[2]);
  if (!functor.output_type) return functor;
  if (wrapper == "BinaryFunctor<") {
    functor.inputs = 2;
    functor.input_types = {first, second};
    functor.value = [op](const char* state, const Number* in) { return op(state, in[0], in[1]); };
  } else {
    bool holds_first = wrapper == "AUnaryFunctor<";
    Type held = holds_first ? first : second;
    if (!held) return functor;
    functor.inputs = 1;
    functor.input_types = {holds_first ? second : first};
    size_t at = aligned(op_bytes, held);
    functor.value = [=](const char* state, const Number* in) {
      Number scalar = read(held, state + at);
      return holds_first ? op(state, scalar, in[0]) : op(state, in[0], scalar);
    };
  }
  return functor;
}

Number ordered(int op, Number left, Number right) {  // OpType of CompareKernels.cu: GE, GT, LE, LT
  return op == 0 ? left >= right : op == 1 ? left > right : op == 2 ? left <= right : left < right;
}

Functor recognise_functor(const std::string& text) {
  Functor functor;
  for (const char* wrapper : {"AUnaryFunctor<", "BUnaryFunctor<", "BinaryFunctor<"}) {
    std::vector<std::string> types = template_arguments(text, wrapper);
    if (types.size() < 4) continue;
    const std::string& op = types[3];
    if (op.find("CompareEqFunctor<") != std::string::npos) {  // holds EQ or NE
      functor = with_scalar(wrapper, types, 4, [](const char* state, Number a, Number b) { return Number((a == b) != (*reinterpret_cast<const int*>(state) == 1)); });
      functor.is_equality = true;
      functor.negates = [](const char* state) { return *reinterpret_cast<const int*>(state) == 1; };
      return functor;
    }
    if (op.find("CompareFunctor<") != std::string::npos)
      return with_scalar(wrapper, types, 4, [](const char* state, Number a, Number b) { return ordered(*reinterpret_cast<const int*>(state), a, b); });
    if (op.find("BitwiseAndFunctor<") != std::string::npos)
      return with_scalar(wrapper, types, 1, [](const char*, Number a, Number b) { return Number(int64_t(a) & int64_t(b)); });
    if (op.find("BitwiseOrFunctor<") != std::string::npos)
      return with_scalar(wrapper, types, 1, [](const char*, Number a, Number b) { return Number(int64_t(a) | int64_t(b)); });
    if (op.find("MulFunctor<") != std::string::npos)
      return with_scalar(wrapper, types, 1, [](const char*, Number a, Number b) { return a * b; });
    return functor;
  }
  if (size_t at = text.find("compare_scalar_kernel<"); at != std::string::npos) {  // a lambda that holds OpType and the scalar
    Type type = type_named(template_arguments(text, "compare_scalar_kernel<").at(0));
    if (!type) return functor;
    functor.inputs = 1;
    functor.input_types = {type};
    functor.output_type = BOOL;
    size_t scalar_at = aligned(4, type);
    functor.value = [=](const char* state, const Number* in) {
      return ordered(*reinterpret_cast<const int*>(state), in[0], read(type, state + scalar_at));
    };
    return functor;
  }
  if (size_t at = text.find("FillFunctor<"); at != std::string::npos) {
    Type type = type_named(template_arguments(text, "FillFunctor<").at(0));
    if (!type) return functor;
    functor.inputs = 0;
    functor.output_type = type;
    functor.value = [=](const char* state, const Number*) { return read(type, state); };
    return functor;
  }
  // a cast in torch 2.15; 2.13 casts as it loads
  if (std::vector<std::string> types = template_arguments(text, "converting_copy_kernel_cuda<"); types.size() >= 2) {
    Type from = type_named(types[0]), to = type_named(types[1]);
    if (!from || !to) return functor;
    functor.inputs = 1;
    functor.input_types = {from};
    functor.output_type = to;
    functor.value = [](const char*, const Number* in) { return in[0]; };
    return functor;
  }
  bool is_copy = text.find("direct_copy_kernel_cuda") != std::string::npos;
  bool is_not = text.find("bitwise_not_kernel_cuda") != std::string::npos || text.find("logical_not_kernel_cuda") != std::string::npos;
  if (is_copy || is_not) {  // the innermost lambda takes the element: {lambda(long)#1}
    size_t at = text.rfind("{lambda(");
    while (at != std::string::npos && (text.compare(at, 9, "{lambda()") == 0 || text.compare(at, 12, "{lambda(int)") == 0)) at = at ? text.rfind("{lambda(", at - 1) : std::string::npos;
    if (at == std::string::npos && text.find("{lambda(int)") != std::string::npos) at = text.find("{lambda(int)");
    if (at == std::string::npos) return functor;
    Type type = type_named(arguments_in(text, at + strlen("{lambda")).at(0));
    if (!type) return functor;
    functor.inputs = 1;
    functor.input_types = {type};
    functor.output_type = is_not && text.find("logical_not") != std::string::npos ? BOOL : type;
    bool is_logical = functor.output_type == BOOL;
    functor.value = [=](const char*, const Number* in) { return is_copy ? in[0] : is_logical ? Number(in[0] == 0) : Number(~int64_t(in[0])); };
  }
  return functor;
}

// --- where the elements are

// OffsetCalculator: dims, IntDivider {divisor, m1, shift} of each size, strides in bytes for each tensor.
struct Offsets {
  static constexpr int MAX_DIMS = 25;
  const char* calculator;
  int tensors;
  int dims() const { return *reinterpret_cast<const int*>(calculator); }
  unsigned size(int dim) const { return *reinterpret_cast<const unsigned*>(calculator + 4 + 12 * dim); }
  unsigned stride(int dim, int tensor) const { return *reinterpret_cast<const unsigned*>(calculator + 4 + 12 * MAX_DIMS + 4 * (dim * tensors + tensor)); }
  size_t bytes() const { return 4 + 12 * MAX_DIMS + 4 * MAX_DIMS * tensors; }
  bool covers(size_t count) const {
    if (dims() < 0 || dims() > MAX_DIMS) return false;
    size_t product = 1;
    for (int dim = 0; dim < dims(); dim++) product *= size(dim);
    return product == count;
  }
  size_t end(int tensor) const {  // bytes from the first element to behind the last one's first byte: its size is not known here
    size_t last = 1;
    for (int dim = 0; dim < dims(); dim++) last += size_t(size(dim) - 1) * stride(dim, tensor);
    return last;
  }
  size_t at(size_t element, int tensor) const {
    size_t offset = 0;
    for (int dim = 0; dim < dims(); dim++) {
      offset += element % size(dim) * stride(dim, tensor);
      element /= size(dim);
    }
    return offset;
  }
};

bool on_gpu(const void* address) { return locate(address).kind == ON_GPU; }

struct Elements {
  size_t count = 0;
  std::vector<char*> tensors;      // the output, then the inputs
  const char* functor_state = nullptr;
  const Offsets* offsets = nullptr;  // nullptr: contiguous
  std::vector<Type> types;         // as they lie in memory
  char* address(size_t element, int tensor) const {
    return tensors[tensor] + (offsets ? offsets->at(element, tensor) : element * size_of(types[tensor]));
  }
};

void write_elements(const Functor& functor, const Elements& elements) {
  bool is_self_comparison = functor.is_equality && functor.inputs == 2 && elements.tensors[1] == elements.tensors[2];
  std::vector<std::pair<char*, Number>> results;
  results.reserve(elements.count);
  bool all_known = true;
  for (size_t element = 0; element < elements.count; element++) {
    Number in[3] = {};
    bool inputs_known = true;
    for (int input = 0; input < functor.inputs; input++) {
      Type type = elements.types[input + 1];
      const char* at = elements.address(element, input + 1);
      if (!type || !is_known(at, size_of(type))) { inputs_known = false; break; }
      in[input] = read(type, at);
    }
    Number value = 0;
    if (is_self_comparison) value = !functor.negates(elements.functor_state);
    else if (inputs_known) value = functor.value(elements.functor_state, in);
    else if (functor.is_equality) value = functor.negates(elements.functor_state);
    else all_known = false;
    results.push_back({elements.address(element, 0), value});
    if (!all_known) break;
  }
  Type type = elements.types[0];
  if (!all_known) { mark_unknown(elements.tensors[0], elements.offsets ? elements.offsets->end(0) : elements.count * size_of(type)); return; }
  for (auto& [address, value] : results) { write(type, address, value); if (elements.offsets) mark_known(address, size_of(type)); }
  if (!elements.offsets) mark_known(elements.tensors[0], elements.count * size_of(type));
}

// torch's ScalarType numbers that stand in LoadWithCast and StoreWithCast.
Type scalar_type(int8_t number) {
  switch (number) {
    case 0: return UINT8;
    case 1: return INT8;
    case 2: return INT16;
    case 3: return INT32;
    case 4: return INT64;
    case 6: return FLOAT;
    case 7: return DOUBLE;
    case 11: return BOOL;
    default: return NO_TYPE;
  }
}

// --- kernels

struct KernelKind {
  enum { OTHER, CONTIGUOUS, STRIDED, REDUCTION, COUNT_NONZERO, COUNT_NONZERO_PARTS, COUNT_END } family = OTHER;
  Functor functor;
  bool casts = false;
  bool is_strided = false;            // (count, lambda), whatever it computes
  Type element = NO_TYPE, result = NO_TYPE;
  enum { SUM, ALL, ANY, MAX, MIN } reduction = SUM;
  std::vector<int> written_pointers;  // parameters that are a pointer to what the kernel may write
  std::vector<int> pointer_arrays;    // parameters of type std::array<char*, N>: the first is written
};

bool starts(const std::string& text, const char* beginning) { return text.compare(0, strlen(beginning), beginning) == 0; }

void recognise_reduction(const std::string& text, KernelKind& kind) {
  kind.family = KernelKind::REDUCTION;
  std::vector<std::string> types = template_arguments(text, "ReduceOp<");
  if (types.size() < 4) return;
  kind.element = type_named(types[0]);
  kind.result = type_named(types[3]);
  const std::string& op = types[1];
  bool is_known_op = true;
  if (op.find("sum_functor<") != std::string::npos) kind.reduction = KernelKind::SUM;
  else if (op.find("and_kernel_cuda") != std::string::npos) kind.reduction = KernelKind::ALL;
  else if (op.find("or_kernel_cuda") != std::string::npos) kind.reduction = KernelKind::ANY;
  else if (op.find("MaxNanFunctor<") != std::string::npos) kind.reduction = KernelKind::MAX;
  else if (op.find("MinNanFunctor<") != std::string::npos) kind.reduction = KernelKind::MIN;
  else is_known_op = false;
  if (!is_known_op) kind.element = NO_TYPE;
}

KernelKind recognise(const char* mangled) {
  KernelKind kind;
  int status = 0;
  char* demangled = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
  if (status) return kind;
  std::string text = demangled;
  free(demangled);
  if (text.find("DeviceReduceSingleTileKernel") != std::string::npos)
    kind.family = text.find("NonZeroOp<") != std::string::npos ? KernelKind::COUNT_NONZERO : KernelKind::COUNT_END;
  else if (text.find("DeviceReduceKernel") != std::string::npos && text.find("NonZeroOp<") != std::string::npos)
    kind.family = KernelKind::COUNT_NONZERO_PARTS;
  if (text.find("NonZeroOp<") != std::string::npos) kind.element = type_named(template_arguments(text, "NonZeroOp<").at(0));
  if (starts(text, "void at::native::reduce_kernel<")) recognise_reduction(text, kind);
  bool is_contiguous = starts(text, "void at::native::vectorized_elementwise_kernel<") || starts(text, "void at::native::unrolled_elementwise_kernel<");
  kind.is_strided = starts(text, "void at::native::elementwise_kernel<");
  if (is_contiguous || kind.is_strided) {
    kind.functor = recognise_functor(text);
    kind.casts = text.find("LoadWithCast<") != std::string::npos;
    bool has_plain_offsets = text.find("unrolled_elementwise_kernel<") == std::string::npos || text.find("TrivialOffsetCalculator<") != std::string::npos;
    if (kind.functor.inputs >= 0 && has_plain_offsets) kind.family = is_contiguous ? KernelKind::CONTIGUOUS : KernelKind::STRIDED;
  }
  size_t depth = 0, open = text.size();
  while (open-- > 0) {  // the parameter list is the last pair of parentheses
    if (text[open] == ')') depth++;
    if (text[open] == '(' && --depth == 0) break;
  }
  std::vector<std::string> parameters = arguments_in(text, open);
  for (size_t number = 0; number < parameters.size(); number++) {
    const std::string& parameter = parameters[number];
    if (parameter.back() == '*' && (parameter.size() < 6 || parameter.compare(parameter.size() - 6, 5, "const"))) kind.written_pointers.push_back(number);
    if (starts(parameter, "std::array<char*")) kind.pointer_arrays.push_back(number);
  }
  return kind;
}

// The tensors of a strided kernel's lambda, behind the offsets; none where the layout is another.
std::vector<char*> strided_tensors(const Offsets& offsets, size_t count) {
  std::vector<char*> tensors;
  if (!offsets.covers(count)) return tensors;
  char* const* pointers = reinterpret_cast<char* const*>(offsets.calculator + (offsets.bytes() + 7) / 8 * 8);
  for (int tensor = 0; tensor < offsets.tensors; tensor++) {
    if (!on_gpu(pointers[tensor])) return {};
    tensors.push_back(pointers[tensor]);
  }
  return tensors;
}

void forget_outputs(const KernelKind& kind, void** arguments) {
  if (kind.is_strided) {
    size_t count = *static_cast<int*>(arguments[0]);
    for (int tensors = 5; tensors > 0; tensors--) {
      Offsets offsets{static_cast<const char*>(arguments[1]), tensors};
      std::vector<char*> addresses = strided_tensors(offsets, count);
      if (addresses.empty()) continue;
      mark_unknown(addresses[0], offsets.end(0));
      return;
    }
  }
  for (int parameter : kind.written_pointers) mark_block_unknown(*static_cast<void**>(arguments[parameter]));
  for (int parameter : kind.pointer_arrays) mark_block_unknown(*static_cast<void**>(arguments[parameter]));
}

std::vector<Type> types_in_memory(const KernelKind& kind) {
  std::vector<Type> types = {kind.functor.output_type};
  types.insert(types.end(), kind.functor.input_types.begin(), kind.functor.input_types.end());
  return types;
}

// (count, functor, pointers, [offsets of inputs, of outputs, loader, storer])
bool answer_contiguous(const KernelKind& kind, void** arguments) {
  Elements elements;
  elements.count = *static_cast<int*>(arguments[0]);
  elements.functor_state = static_cast<const char*>(arguments[1]);
  char** pointers = static_cast<char**>(arguments[2]);
  elements.types = types_in_memory(kind);
  if (elements.count > MAX_ELEMENTS) return false;
  if (kind.casts) {
    elements.types[0] = scalar_type(*static_cast<int8_t*>(arguments[6]));
    for (int input = 0; input < kind.functor.inputs; input++) elements.types[input + 1] = scalar_type(static_cast<int8_t*>(arguments[5])[input]);
    if (!elements.types[0]) return false;
  }
  for (int tensor = 0; tensor <= kind.functor.inputs; tensor++) {
    if (!on_gpu(pointers[tensor])) return false;
    elements.tensors.push_back(pointers[tensor]);
  }
  write_elements(kind.functor, elements);
  return true;
}

// (count, lambda that holds the offsets, the pointers and the functor)
bool answer_strided(const KernelKind& kind, void** arguments) {
  Elements elements;
  elements.count = *static_cast<int*>(arguments[0]);
  Offsets offsets{static_cast<const char*>(arguments[1]), kind.functor.inputs + 1};
  if (elements.count > MAX_ELEMENTS) return false;
  elements.tensors = strided_tensors(offsets, elements.count);
  if (elements.tensors.empty()) return false;
  elements.functor_state = offsets.calculator + (offsets.bytes() + 7) / 8 * 8 + 8 * offsets.tensors;
  elements.offsets = &offsets;
  elements.types = types_in_memory(kind);
  write_elements(kind.functor, elements);
  return true;
}

// ReduceConfig: bytes of the accumulator, inputs, outputs, then 13 more words; behind it the offsets of inputs and of outputs, source, target.
bool answer_reduction(const KernelKind& kind, void** arguments) {
  const char* op = static_cast<const char*>(arguments[0]);
  constexpr size_t CONFIG_BYTES = 64;
  for (size_t config_at = 0; config_at <= 48; config_at += 4) {
    const int* config = reinterpret_cast<const int*>(op + config_at);
    if ((config[0] != 1 && config[0] != 4 && config[0] != 8) || config[1] < 1 || config[2] < 1) continue;
    size_t inputs = config[1], outputs = config[2];
    Offsets input{op + config_at + CONFIG_BYTES, 1};
    Offsets output{input.calculator + input.bytes(), 2};
    if (!input.covers(inputs) || !output.covers(outputs)) continue;
    size_t source_at = (output.calculator + output.bytes() - op + 7) / 8 * 8;
    const char* source = *reinterpret_cast<char* const*>(op + source_at);
    char* target = *reinterpret_cast<char* const*>(op + source_at + 8);
    if (!on_gpu(source) || !on_gpu(target)) continue;
    if (!kind.element || !kind.result || inputs * outputs > MAX_ELEMENTS) {
      mark_unknown(target, output.end(0));
      return true;
    }
    for (size_t number = 0; number < outputs; number++) {
      const char* slice = source + output.at(number, 1);
      Number result = 0;
      bool all_known = true;
      for (size_t element = 0; element < inputs && all_known; element++) {
        const char* at = slice + input.at(element, 0);
        if (!is_known(at, size_of(kind.element))) { all_known = false; break; }
        Number value = read(kind.element, at);
        if (!element && kind.reduction != KernelKind::SUM) result = value;
        switch (kind.reduction) {
          case KernelKind::SUM: result += value; break;
          case KernelKind::ALL: result = result != 0 && value != 0; break;
          case KernelKind::ANY: result = result != 0 || value != 0; break;
          case KernelKind::MAX: result = std::max(result, value); break;
          case KernelKind::MIN: result = std::min(result, value); break;
        }
      }
      char* into = target + output.at(number, 0);
      if (all_known) { write(kind.result, into, result); mark_known(into, size_of(kind.result)); }
      else mark_unknown(into, size_of(kind.result));
    }
    return true;
  }
  return false;
}

int count_nonzero(Type type, const char* mask, int count) {
  if (!type || size_t(count) > MAX_ELEMENTS || !is_known(mask, count * size_of(type))) return count;
  int sum = 0;
  for (int element = 0; element < count; element++) sum += read(type, mask + element * size_of(type)) != 0;
  return sum;
}

void put_count(void* target, int count) {
  if (!on_gpu(target)) return;
  *static_cast<int*>(target) = count;
  mark_known(target, sizeof count);
}

}  // namespace

void answer_launch(const char* mangled, void** arguments) {
  static std::recursive_mutex answers_mutex;
  static auto* kinds = new std::unordered_map<const char*, KernelKind>;
  static thread_local void* count_parts;  // of a long mask: sums of its parts come first, then their sum
  static thread_local int count_of_parts;
  std::lock_guard<std::recursive_mutex> guard(answers_mutex);
  auto entry = kinds->find(mangled);
  if (entry == kinds->end()) entry = kinds->emplace(mangled, recognise(mangled)).first;
  const KernelKind& kind = entry->second;
  bool is_answered = false;
  switch (kind.family) {
    case KernelKind::CONTIGUOUS: is_answered = answer_contiguous(kind, arguments); break;
    case KernelKind::STRIDED: is_answered = answer_strided(kind, arguments); break;
    case KernelKind::REDUCTION: is_answered = answer_reduction(kind, arguments); break;
    case KernelKind::COUNT_NONZERO:  // (mask, target, count, ...)
      put_count(*static_cast<void**>(arguments[1]), count_nonzero(kind.element, *static_cast<char**>(arguments[0]), *static_cast<int*>(arguments[2])));
      return;
    case KernelKind::COUNT_NONZERO_PARTS:
      count_parts = *static_cast<void**>(arguments[1]);
      count_of_parts = count_nonzero(kind.element, *static_cast<char**>(arguments[0]), *static_cast<int*>(arguments[2]));
      return;
    case KernelKind::COUNT_END:
      if (!count_parts || *static_cast<void**>(arguments[0]) != count_parts) break;
      put_count(*static_cast<void**>(arguments[1]), count_of_parts);
      count_parts = nullptr;
      return;
    case KernelKind::OTHER: break;
  }
  if (!is_answered) forget_outputs(kind, arguments);
}

}  // namespace standin
