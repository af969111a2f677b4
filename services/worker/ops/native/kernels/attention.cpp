// Runs the pieces of a step's attention on all threads, and merges the results of pieces that have the same rows.
#include "attention.h"
#include "pool.h"
#include "recording.h"

namespace lockstep {
namespace {

// Calls `body(row, token, head)` for the rows of a piece: tokens of the step, and query heads.
template <typename Body>
void for_each_row(const Step& step, const Piece& piece, Body body) {
    int64_t row = 0;
    for (int64_t i = 0; i < piece.num_kv_heads; ++i) {
        const int64_t first_head = (piece.first_kv_head + i) * step.group_size() + piece.first_group_head;
        for (int64_t token = piece.first_token; token < piece.first_token + piece.num_tokens; ++token) {
            for (int64_t head = first_head; head < first_head + piece.num_group_heads; ++head) {
                body(row++, token, head);
            }
        }
    }
}

template <typename T>
void load_rows(const AttentionArgs& args, const Piece& piece, Vec factor, Scratch& scratch) {
    for_each_row(*args.step, piece, [&](int64_t row, int64_t token, int64_t head) {
        const T* query =
            static_cast<const T*>(args.query) + token * args.query_token_stride + head * args.query_head_stride;
        float* to = scratch.query + row * scratch.key_width;
        for_vectors(args.step->head_dim,
                    [&](int64_t i, int64_t count) { store(to + i, mul(load_up_to(query + i, count), factor)); });
    });
}

// Writes one row of the result. A row that saw nothing is 0.
template <typename T>
void write_row(const AttentionArgs& args, int64_t token, int64_t head, const float* sum, float highest, float total) {
    float factor = 1.0f;
    if (args.sinks != nullptr) {
        const float sink = args.sinks[head] * kLog2E, most = std::max(highest, sink);
        factor = exp2(highest - most);
        total = total * factor + exp2(sink - most);
    }
    const Vec scale = broadcast(total == 0.0f ? 0.0f : factor / total);
    T* output = static_cast<T*>(args.output) + (token * args.step->num_heads + head) * args.step->value_dim;
    for_vectors(args.step->value_dim,
                [&](int64_t i, int64_t count) { store_up_to(output + i, mul(load(sum + i), scale), count); });
}

void write_row(const AttentionArgs& args, int64_t token, int64_t head, const float* sum, float highest, float total) {
    if (args.format == kBfloat16) {
        write_row<bf16>(args, token, head, sum, highest, total);
    } else {
        write_row<float>(args, token, head, sum, highest, total);
    }
}

float* partial_row(const AttentionArgs& args, const Piece& piece, int64_t part, int64_t row) {
    return args.step->partials + (piece.first_partial + part * piece.num_rows() + row) * partial_size(args.step->value_dim);
}

void write_partial(const AttentionArgs& args, const Piece& piece, const Scratch& scratch) {
    for (int64_t row = 0; row < piece.num_rows(); ++row) {
        float* to = partial_row(args, piece, piece.part, row);
        to[0] = scratch.highest[row], to[1] = sum(load(scratch.totals + row * kWidth));
        std::memcpy(to + 16, scratch.sum + row * scratch.value_width, scratch.value_width * sizeof(float));
    }
}

// In the order of the parts, whichever thread does it, so that results do not depend on the threads' order.
void merge(const AttentionArgs& args, const Piece& piece, const Scratch& scratch) {
    for_each_row(*args.step, piece, [&](int64_t row, int64_t token, int64_t head) {
        float highest = -INFINITY, total = 0.0f;
        for (int64_t part = 0; part < piece.num_parts; ++part) {
            highest = std::max(highest, partial_row(args, piece, part, row)[0]);
        }
        std::fill_n(scratch.sum, scratch.value_width, 0.0f);
        for (int64_t part = 0; part < piece.num_parts; ++part) {
            const float* from = partial_row(args, piece, part, row);
            // A part that saw nothing adds nothing, but for a NaN.
            const float factor = from[0] == highest ? 1.0f : exp2(from[0] - highest);
            total += from[1] * factor;
            for_vectors(args.step->value_dim, [&](int64_t i, int64_t) {
                store(scratch.sum + i, fma(load(from + 16 + i), broadcast(factor), load(scratch.sum + i)));
            });
        }
        write_row(args, token, head, scratch.sum, highest, total);
    });
}

template <typename T>
void attend(const AttentionArgs& args, int64_t number, float* memory) {
    const Step& step = *args.step;
    const Piece& piece = step.pieces[number];
    if (piece.is_chunk) {
        return attend_chunk<T>(args, piece, memory);
    }
    // Threads take pieces in turn.
    const int64_t next = number + step.num_threads;
    const bool is_known = next < step.num_pieces && !step.pieces[next].is_chunk;
    attend_decode<T>(args, piece, is_known ? step.pieces + next : nullptr, memory);
}

void attend(const AttentionArgs& args, int64_t number, float* memory) {
    switch (args.cache_format) {
        case kFloat32:
            return attend<float>(args, number, memory);
        case kBfloat16:
            return attend<bf16>(args, number, memory);
        default:
            return attend<int8_t>(args, number, memory);
    }
}

}  // namespace

void begin(const AttentionArgs& args, const Piece& piece, float factor, Scratch& scratch) {
    if (args.format == kBfloat16) {
        load_rows<bf16>(args, piece, broadcast(factor), scratch);
    } else {
        load_rows<float>(args, piece, broadcast(factor), scratch);
    }
    const int64_t num_rows = piece.num_rows();
    std::fill_n(scratch.sum, num_rows * scratch.value_width, 0.0f);
    std::fill_n(scratch.highest, num_rows, -INFINITY);
    std::fill_n(scratch.totals, num_rows * kWidth, 0.0f);
}

void finish(const AttentionArgs& args, const Piece& piece, const Scratch& scratch) {
    if (piece.num_parts == 1) {
        for_each_row(*args.step, piece, [&](int64_t row, int64_t token, int64_t head) {
            const float* values = scratch.sum + row * scratch.value_width;
            write_row(args, token, head, values, scratch.highest[row], sum(load(scratch.totals + row * kWidth)));
        });
        return;
    }
    write_partial(args, piece, scratch);
    int32_t* counter = args.step->counters + piece.counter;
    if (__atomic_add_fetch(counter, 1, __ATOMIC_ACQ_REL) == piece.num_parts) {
        __atomic_store_n(counter, 0, __ATOMIC_RELAXED);
        merge(args, piece, scratch);
    }
}

namespace {

void attend_all(const AttentionArgs& args) {
    const Step& step = *args.step;
    for_pieces(step.num_pieces, step.num_threads, [&](int64_t piece) {
        attend(args, piece, step.scratch + thread_number() * step.scratch_size);
    });
}

}  // namespace
}  // namespace lockstep

using namespace lockstep;

LS_EXPORT void ls_plan_attention(const PlanArgs* args) { plan(*args); }

LS_EXPORT void ls_attention(const AttentionArgs* args) { run_kernel<attend_all>(args); }
