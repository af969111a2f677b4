// Norms, activations, a factor, a choice of columns and that of the largest logit: row by row, in float32.
#include <cmath>

#include "pool.h"
#include "recording.h"
#include "simd.h"

namespace lockstep {
namespace {

// Elements from which a second thread saves more than it costs to wake it.
constexpr int64_t kWorthThreads = 64 * 1024;

struct RmsNormArgs {
    const void* x;
    const void* weight;
    void* output;
    int64_t num_tokens, num_heads, dim;
    int64_t token_stride, head_stride;
    double eps;
    int64_t format, weight_format;
};

struct AddRmsNormArgs {
    void* x;
    void* residual;
    const void* weight;
    int64_t num_tokens, dim;
    double eps;
    int64_t format, weight_format;
};

struct LayerNormArgs {
    const void* x;
    const void* weight;
    const void* bias;
    void* output;
    int64_t num_tokens, dim, token_stride;
    double eps;
    int64_t format;
};

enum Activation : int64_t { kSilu = 0, kGeluTanh = 1 };

struct ActAndMulArgs {
    const void* x;
    void* output;
    int64_t num_tokens, dim;
    int64_t activation;
    int64_t format;
};

struct ScaleArgs {
    void* x;
    int64_t num_tokens, dim;
    double factor;
    int64_t format;
};

struct TakeColumnsArgs {
    const void* x;
    const int64_t* columns;
    void* output;
    int64_t num_rows, num_columns, row_stride;
    int64_t format;
};

struct GreedySampleArgs {
    const float* logits;
    int64_t* token_ids;
    float* largest;
    int64_t num_rows, num_columns, row_stride;
};

float inverse_root(float sum_of_squares, int64_t dim, double eps) {
    return 1.0f / std::sqrt(sum_of_squares / static_cast<float>(dim) + static_cast<float>(eps));
}

template <typename T, typename Weight>
void scale_row(const T* x, const Weight* weight, T* output, int64_t dim, float factor) {
    const Vec factors = broadcast(factor);
    for_vectors(dim, [&](int64_t i, int64_t count) {
        const Vec scaled = mul(load_up_to(x + i, count), factors);
        store_up_to(output + i, mul(scaled, load_up_to(weight + i, count)), count);
    });
}

template <typename T, typename Weight>
void rms_norm(const RmsNormArgs& args) {
    for_rows(args.num_tokens * args.num_heads, args.dim, kWorthThreads, [&](int64_t row) {
        const int64_t token = row / args.num_heads, head = row % args.num_heads;
        const T* x = static_cast<const T*>(args.x) + token * args.token_stride + head * args.head_stride;
        Vec squares = zeros();
        for_vectors(args.dim, [&](int64_t i, int64_t count) {
            const Vec values = load_up_to(x + i, count);
            squares = fma(values, values, squares);
        });
        T* output = static_cast<T*>(args.output) + row * args.dim;
        scale_row(x, static_cast<const Weight*>(args.weight), output, args.dim,
                  inverse_root(sum(squares), args.dim, args.eps));
    });
}

template <typename T, typename Weight>
void add_rms_norm(const AddRmsNormArgs& args) {
    for_rows(args.num_tokens, args.dim, kWorthThreads, [&](int64_t row) {
        T* x = static_cast<T*>(args.x) + row * args.dim;
        T* residual = static_cast<T*>(args.residual) + row * args.dim;
        Vec squares = zeros();
        for_vectors(args.dim, [&](int64_t i, int64_t count) {
            store_up_to(residual + i, add(load_up_to(x + i, count), load_up_to(residual + i, count)), count);
            // As rounded.
            const Vec values = load_up_to(residual + i, count);
            squares = fma(values, values, squares);
        });
        scale_row(residual, static_cast<const Weight*>(args.weight), x, args.dim,
                  inverse_root(sum(squares), args.dim, args.eps));
    });
}

template <typename T>
void layer_norm(const LayerNormArgs& args) {
    for_rows(args.num_tokens, args.dim, kWorthThreads, [&](int64_t row) {
        const T* x = static_cast<const T*>(args.x) + row * args.token_stride;
        T* output = static_cast<T*>(args.output) + row * args.dim;
        Vec total = zeros();
        for_vectors(args.dim, [&](int64_t i, int64_t count) { total = add(total, load_up_to(x + i, count)); });
        const float mean = sum(total) / static_cast<float>(args.dim);
        float squares = 0;
        for (int64_t i = 0; i < args.dim; ++i) {
            const float difference = to_float(x[i]) - mean;
            squares += difference * difference;
        }
        const Vec factor = broadcast(inverse_root(squares, args.dim, args.eps)), means = broadcast(mean);
        for_vectors(args.dim, [&](int64_t i, int64_t count) {
            const Vec weights = mul(factor, load_up_to(static_cast<const T*>(args.weight) + i, count));
            const Vec biases = load_up_to(static_cast<const T*>(args.bias) + i, count);
            store_up_to(output + i, fma(sub(load_up_to(x + i, count), means), weights, biases), count);
        });
    });
}

// x * sigmoid(2 u) with u = sqrt(2 / pi) * (x + 0.044715 x^3), which is x / 2 * (1 + tanh(u)).
inline Vec gelu_tanh(Vec x) {
    const Vec cubic = fma(mul(x, x), broadcast(0.044715f), broadcast(1.0f));
    const Vec minus_2u = mul(mul(x, broadcast(-1.5957691216057308f)), cubic);
    return div(x, add(broadcast(1.0f), exp(minus_2u)));
}

template <typename T, Vec (*kActivate)(Vec)>
void act_and_mul(const ActAndMulArgs& args) {
    // Exponentials make an element as dear as several of a norm.
    for_rows(args.num_tokens, 4 * args.dim, kWorthThreads, [&](int64_t row) {
        const T* gate = static_cast<const T*>(args.x) + row * 2 * args.dim;
        const T* up = gate + args.dim;
        T* output = static_cast<T*>(args.output) + row * args.dim;
        for_vectors(args.dim, [&](int64_t i, int64_t count) {
            const Vec activated = kActivate(load_up_to(gate + i, count));
            store_up_to(output + i, mul(activated, load_up_to(up + i, count)), count);
        });
    });
}

template <typename T>
void by_activation(const ActAndMulArgs& args) {
    args.activation == kSilu ? act_and_mul<T, silu>(args) : act_and_mul<T, gelu_tanh>(args);
}

template <typename T>
void scale(const ScaleArgs& args) {
    const Vec factor = broadcast(static_cast<float>(args.factor));
    for_rows(args.num_tokens, args.dim, kWorthThreads, [&](int64_t row) {
        T* x = static_cast<T*>(args.x) + row * args.dim;
        for_vectors(args.dim, [&](int64_t i, int64_t count) {
            store_up_to(x + i, mul(load_up_to(x + i, count), factor), count);
        });
    });
}

// The first column that `bits` finds, given a vector.
template <typename Bits>
int64_t first_column(const float* row, int64_t num_columns, Bits bits) {
    for (int64_t start = 0; start < num_columns; start += kWidth) {
        const int64_t count = num_columns - start;
        const uint32_t found = bits(load_up_to(row + start, count)) & (count < kWidth ? (1u << count) - 1 : ~0u);
        if (found) {
            return start + __builtin_ctz(found);
        }
    }
    return 0;
}

void greedy_sample(const GreedySampleArgs& args) {
    for_rows(args.num_rows, args.num_columns, kWorthThreads, [&](int64_t index) {
        const float* row = args.logits + index * args.row_stride;
        uint32_t nans = 0;
        Vec largest = broadcast(-INFINITY);
        const int64_t num_whole = args.num_columns / kWidth * kWidth;
        for (int64_t i = 0; i < num_whole; i += kWidth) {
            const Vec values = load(row + i);
            nans |= nan_bits(values);
            largest = max(largest, values);
        }
        float best = max_of(largest);
        for (int64_t i = num_whole; i < args.num_columns; ++i) {
            nans |= row[i] != row[i];
            best = row[i] > best ? row[i] : best;
        }
        if (nans) {
            best = NAN;
            args.token_ids[index] = first_column(row, args.num_columns, nan_bits);
        } else {
            const Vec wanted = broadcast(best);
            args.token_ids[index] =
                first_column(row, args.num_columns, [&](Vec values) { return equal_bits(values, wanted); });
        }
        args.largest[index] = best;
    });
}

template <class T>
void take_columns(const TakeColumnsArgs& args) {
    for_rows(args.num_rows, args.num_columns, kWorthThreads, [&](int64_t index) {
        const T* row = static_cast<const T*>(args.x) + index * args.row_stride;
        T* output = static_cast<T*>(args.output) + index * args.num_columns;
        for (int64_t i = 0; i < args.num_columns; ++i) output[i] = row[args.columns[i]];
    });
}

// The kernel for the call's format.
template <auto kBfloat16Kernel, auto kFloat32Kernel, class Args>
void by_format(const Args& args) {
    args.format == kBfloat16 ? kBfloat16Kernel(args) : kFloat32Kernel(args);
}

// Rows in bfloat16 may have weights in float32.
template <auto kBfloat16Kernel, auto kMixedKernel, auto kFloat32Kernel, class Args>
void by_formats(const Args& args) {
    if (args.format == kBfloat16 && args.weight_format != kBfloat16) {
        return kMixedKernel(args);
    }
    by_format<kBfloat16Kernel, kFloat32Kernel, Args>(args);
}

}  // namespace
}  // namespace lockstep

using namespace lockstep;

LS_EXPORT void ls_rms_norm(const RmsNormArgs* args) {
    run_kernel<by_formats<rms_norm<bf16, bf16>, rms_norm<bf16, float>, rms_norm<float, float>, RmsNormArgs>>(args);
}

// Writes the sum into `residual` and its norm into `x`.
LS_EXPORT void ls_add_rms_norm(const AddRmsNormArgs* args) {
    run_kernel<by_formats<add_rms_norm<bf16, bf16>, add_rms_norm<bf16, float>, add_rms_norm<float, float>,
                          AddRmsNormArgs>>(args);
}

LS_EXPORT void ls_layer_norm(const LayerNormArgs* args) {
    run_kernel<by_format<layer_norm<bf16>, layer_norm<float>, LayerNormArgs>>(args);
}

LS_EXPORT void ls_act_and_mul(const ActAndMulArgs* args) {
    run_kernel<by_format<by_activation<bf16>, by_activation<float>, ActAndMulArgs>>(args);
}

LS_EXPORT void ls_scale(const ScaleArgs* args) {
    run_kernel<by_format<scale<bf16>, scale<float>, ScaleArgs>>(args);
}

LS_EXPORT void ls_take_columns(const TakeColumnsArgs* args) {
    run_kernel<by_format<take_columns<bf16>, take_columns<float>, TakeColumnsArgs>>(args);
}

LS_EXPORT void ls_greedy_sample(const GreedySampleArgs* args) { run_kernel<greedy_sample>(args); }
