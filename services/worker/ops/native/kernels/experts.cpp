// A layer's experts: each is a gated network of two products.
//
// Rows are pairs of a token and one of its experts, sorted by expert, so that an expert's rows are multiplied together.
#include <algorithm>

#include "pool.h"
#include "product.h"

namespace lockstep::products {

namespace {

// Rows that are computed at once, which bounds the memory for them.
constexpr int64_t kRowsAtOnce = 1024;
constexpr float kLog2E = 1.44269504f;

// Shared with Python (`experts.py`).
struct Expert {
    const Matrix* gate_up;  // [2 * inner, hidden]: the gate's rows, then up's
    const Matrix* down;     // [hidden, inner]
};

struct ExpertsCall {
    const Expert* experts;  // [num_experts]
    int64_t num_experts;
    double alpha;  // of the clamped activation
    double limit;  // likewise; 0 for the plain activation
    const void* x;  // [num_tokens, hidden] in the matrices' dtype, `x_stride` elements from row to row
    int64_t x_stride;
    const int32_t* ids;    // [num_tokens, num_chosen]; `num_experts` for an expert that is elsewhere
    const float* weights;  // [num_tokens, num_chosen]
    void* out;             // [num_tokens, hidden], contiguous; written
    int64_t num_tokens;
    int64_t num_chosen;
};

// silu(gate) * up, or with a clamp (up + 1) * gate * sigmoid(alpha * gate); written over the gate.
void activate(const ExpertsCall& call, float* gate, const float* up, int64_t size) {
    const bool has_clamp = call.limit > 0.0;
    const Floats factor = fill((has_clamp ? static_cast<float>(call.alpha) : 1.0f) * kLog2E);
    const Floats limit = fill(static_cast<float>(call.limit)), least = sub(zeros(), limit);
    for (int64_t first = 0; first < size; first += kLanes) {
        const int count = static_cast<int>(std::min<int64_t>(size - first, kLanes));
        Floats gates = load_first(gate + first, count), ups = load_first(up + first, count);
        if (has_clamp) {
            gates = min(limit, gates);
            ups = add(min(limit, max(least, ups)), fill(1.0f));
        }
        const Floats values = mul(mul(gates, sigmoid_of_power(mul(gates, factor))), ups);
        store_first(gate + first, values, count);
    }
}

// A run of tokens, with all of their experts.
template <class T>
class Step {
public:
    Step(const ExpertsCall& call, int64_t first_token, int64_t num_tokens)
        : call_(call),
          first_token_(first_token),
          num_tokens_(num_tokens),
          num_rows_(num_tokens * call.num_chosen),
          inner_(call.experts[0].down->num_columns),
          hidden_(call.experts[0].down->num_rows) {}

    // Compute on all threads. `buffer` is this thread's.
    void run(Buffer& buffer) {
        reserve(buffer);
        sort_rows();
        run_phases(
            num_threads(),
            Phase{num_present_, [this](int64_t row) { prepare_input(row); }},
            Phase{num_active_ * tiles_of(true), [this](int64_t piece) { multiply(piece, true); }},
            Phase{num_present_, [this](int64_t row) { prepare_inner(row); }},
            Phase{num_active_ * tiles_of(false), [this](int64_t piece) { multiply(piece, false); }},
            Phase{num_tokens_, [this](int64_t token) { add_up(token); }});
    }

private:
    const Matrix& matrix(int64_t expert, bool is_first) const {
        return is_first ? *call_.experts[expert].gate_up : *call_.experts[expert].down;
    }
    int64_t tiles_of(bool is_first) const { return num_tiles(matrix(0, is_first)); }

    void reserve(Buffer& buffer) {
        // Experts may have different formats.
        for (int64_t expert = 0; expert < call_.num_experts; ++expert) {
            row_bytes_ = std::max(row_bytes_, prepared_row_bytes(matrix(expert, true)));
            row_bytes_ = std::max(row_bytes_, prepared_row_bytes(matrix(expert, false)));
        }
        const int64_t floats = round_up(num_rows_ * (2 * inner_ + hidden_) * 4, 64);
        const int64_t numbers = num_rows_ * 3 + call_.num_experts * 2 + 3;
        const int64_t rows_bytes = num_rows_ * row_bytes_;
        prepared_ = buffer.reserve(rows_bytes + floats + numbers * 8);
        projected_ = reinterpret_cast<float*>(prepared_ + rows_bytes);
        outputs_ = projected_ + num_rows_ * 2 * inner_;
        source_ = reinterpret_cast<int64_t*>(prepared_ + rows_bytes + floats);
        expert_ = source_ + num_rows_;
        place_ = expert_ + num_rows_;
        active_ = place_ + num_rows_;
        first_row_ = active_ + call_.num_experts;
    }

    // A stable sort by counting: rows of an expert are in the order of their tokens. Those of experts that are elsewhere
    // come last, and are not computed.
    void sort_rows() {
        const int32_t* ids = call_.ids + first_token_ * call_.num_chosen;
        std::fill_n(first_row_, call_.num_experts + 3, 0);
        for (int64_t i = 0; i < num_rows_; ++i) ++first_row_[ids[i] + 2];
        for (int64_t expert = 0; expert < call_.num_experts; ++expert) {
            if (first_row_[expert + 2]) active_[num_active_++] = expert;
            first_row_[expert + 2] += first_row_[expert + 1];
        }
        num_present_ = first_row_[call_.num_experts + 1];
        // The start of an expert's rows moves to its end, which is the next one's start.
        for (int64_t i = 0; i < num_rows_; ++i) {
            const int64_t row = first_row_[ids[i] + 1]++;
            source_[row] = i;
            expert_[row] = ids[i];
            place_[i] = row;
        }
    }

    uint8_t* prepared(int64_t row) const { return prepared_ + row * row_bytes_; }

    void prepare_input(int64_t row) {
        const int64_t token = first_token_ + source_[row] / call_.num_chosen;
        prepare_row(matrix(expert_[row], true), static_cast<const T*>(call_.x) + token * call_.x_stride, prepared(row));
    }

    void prepare_inner(int64_t row) {
        float* values = projected_ + row * 2 * inner_;
        activate(call_, values, values + inner_, inner_);
        prepare_row(matrix(expert_[row], false), values, prepared(row));
    }

    // Multiply all rows of an active expert with one of its tiles.
    void multiply(int64_t piece, bool is_first) {
        const int64_t expert = active_[piece / tiles_of(is_first)], tile = piece % tiles_of(is_first);
        const int64_t row = first_row_[expert], count = first_row_[expert + 1] - row;
        const Matrix& m = matrix(expert, is_first);
        float* out = is_first ? projected_ : outputs_;
        // Threads take pieces in turn.
        const int64_t next_tile = std::min(tile + num_threads(), tiles_of(is_first) - 1);
        const TileRun run{tile, tile + 1, next_tile};
        multiply_tiles(m, run, prepared(row), row_bytes_, count, out + row * m.num_rows, m.num_rows);
    }

    // Experts' outputs are rounded to the dtype, as if they had come from elsewhere, and added up in float32.
    void add_up(int64_t token) {
        int64_t* rows = place_ + token * call_.num_chosen;
        std::sort(rows, rows + call_.num_chosen);
        T* out = static_cast<T*>(call_.out) + (first_token_ + token) * hidden_;
        const float* weights = call_.weights + first_token_ * call_.num_chosen;
        for (int64_t first = 0; first < hidden_; first += kLanes) {
            const int count = static_cast<int>(std::min<int64_t>(hidden_ - first, kLanes));
            Floats total = zeros();
            for (int64_t i = 0; i < call_.num_chosen && rows[i] < num_present_; ++i) {
                T rounded[kLanes] = {};
                store_first(rounded, load_first(outputs_ + rows[i] * hidden_ + first, count), count);
                total = fma(load(rounded), fill(weights[source_[rows[i]]]), total);
            }
            store_first(out + first, total, count);
        }
    }

    const ExpertsCall& call_;
    const int64_t first_token_, num_tokens_, num_rows_, inner_, hidden_;
    int64_t row_bytes_ = 0, num_active_ = 0;
    int64_t num_present_ = 0;       // the rows whose experts are here
    uint8_t* prepared_ = nullptr;   // [rows]: inputs of the first product, then of the second
    float* projected_ = nullptr;    // [rows, 2 * inner]: gate and up, then the activation in the first half
    float* outputs_ = nullptr;      // [rows, hidden]
    int64_t* source_ = nullptr;     // [rows]: a row's place among the tokens' choices
    int64_t* expert_ = nullptr;     // [rows]
    int64_t* place_ = nullptr;      // [rows]: the inverse of `source_`
    int64_t* active_ = nullptr;     // [num_active_]: the experts with rows, ascending
    int64_t* first_row_ = nullptr;  // [num_experts + 3]; the first row of an expert, and where the last ones end
};

template <class T>
void run(const ExpertsCall& call) {
    static thread_local Buffer own_buffer;
    const int64_t tokens_at_once = std::max<int64_t>(1, kRowsAtOnce / call.num_chosen);
    for (int64_t first = 0; first < call.num_tokens; first += tokens_at_once) {
        Step<T>(call, first, std::min(tokens_at_once, call.num_tokens - first)).run(own_buffer);
    }
}

}  // namespace

// Adds up each token's weighted experts, in ascending order of their numbers. Returns the number of ids, or the place
// of one that is neither an expert's number nor that of one elsewhere, and nothing is written then.
LS_EXPORT int64_t ls_experts(const ExpertsCall* call) {
    const int64_t num_ids = call->num_tokens * call->num_chosen;
    for (int64_t place = 0; place < num_ids; ++place) {
        if (call->ids[place] < 0 || call->ids[place] > call->num_experts) return place;
    }
    if (call->experts[0].gate_up->dtype == kFloat32) {
        run<float>(*call);
    } else {
        run<bf16>(*call);
    }
    return num_ids;
}

}  // namespace lockstep::products
