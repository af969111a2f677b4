// What this machine can do at most, for `machine_rates.py`: `machine_rates NUM_THREADS NUM_BYTES` prints, as JSON, the
// rate at which all threads together read a buffer of this size, over and over, and their rate of multiply-adds of 8-bit
// integers in registers, with the instructions that the worker's kernels use. Each is the best of many short rounds.

#include <immintrin.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { NUM_ROUNDS = 24, NUM_ACCUMULATORS = 12, NUM_PRODUCTS = 1 << 20, MAX_THREADS = 1024 };

#if defined(__AVX512VNNI__)
typedef __m512i vector;
#define WIDTH 64
#define LOAD(p) _mm512_load_si512(p)
#define OR(a, b) _mm512_or_si512(a, b)
#define FILL(x) _mm512_set1_epi8(x)
#define MULTIPLY_ADD(sum, a, b, ones, product) __asm__ volatile("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b))
#else
typedef __m256i vector;
#define WIDTH 32
#define LOAD(p) _mm256_load_si256(p)
#define OR(a, b) _mm256_or_si256(a, b)
#define FILL(x) _mm256_set1_epi8(x)
#define MULTIPLY_ADD(sum, a, b, ones, product)                                                             \
    __asm__ volatile("vpmaddubsw %3, %2, %1\n\tvpmaddwd %4, %1, %1\n\tvpaddd %1, %0, %0"                    \
                     : "+x"(sum), "=&x"(product)                                                           \
                     : "x"(a), "x"(b), "x"(ones))
#endif

struct thread {
    pthread_t handle;
    pthread_barrier_t* barrier;
    unsigned char* bytes;
    size_t num_bytes;
    uint64_t sink;
    double started_at, ended_at;
};

static double now_s(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

static uint64_t fold(vector value) {
    uint64_t words[WIDTH / 8], result = 0;
    memcpy(words, &value, sizeof words);
    for (int i = 0; i < WIDTH / 8; i++) result ^= words[i];
    return result;
}

static void read_once(struct thread* self) {
    vector sums[4] = {FILL(0), FILL(0), FILL(0), FILL(0)};
    for (size_t at = 0; at < self->num_bytes; at += 4 * WIDTH)
        for (int i = 0; i < 4; i++) sums[i] = OR(sums[i], LOAD((const vector*)(self->bytes + at + i * WIDTH)));
    self->sink ^= fold(OR(OR(sums[0], sums[1]), OR(sums[2], sums[3])));
}

static void multiply_once(struct thread* self) {
    vector sums[NUM_ACCUMULATORS], a = FILL(3), b = FILL(5), ones = FILL(1), product = FILL(0);
    for (int i = 0; i < NUM_ACCUMULATORS; i++) sums[i] = FILL(i);
    for (int round = 0; round < NUM_PRODUCTS / NUM_ACCUMULATORS; round++)
#pragma GCC unroll 12
        for (int i = 0; i < NUM_ACCUMULATORS; i++) MULTIPLY_ADD(sums[i], a, b, ones, product);
    (void)ones, (void)product;
    for (int i = 0; i < NUM_ACCUMULATORS; i++) self->sink ^= fold(sums[i]);
}

static void* run(void* argument) {
    struct thread* self = argument;
    // Each thread touches its own part first, so that it lies in the memory of the thread's own node.
    memset(self->bytes, 1, self->num_bytes);
    for (int round = 0; round < NUM_ROUNDS; round++) {
        for (int kind = 0; kind < 2; kind++) {
            pthread_barrier_wait(self->barrier);
            self->started_at = now_s();
            (kind == 0 ? read_once : multiply_once)(self);
            self->ended_at = now_s();
            pthread_barrier_wait(self->barrier);
        }
    }
    return NULL;
}

// From the first thread's start to the last one's end. The threads are at a barrier.
static double duration_s(const struct thread* threads, int num_threads) {
    double started_at = threads[0].started_at, ended_at = threads[0].ended_at;
    for (int i = 1; i < num_threads; i++) {
        if (threads[i].started_at < started_at) started_at = threads[i].started_at;
        if (threads[i].ended_at > ended_at) ended_at = threads[i].ended_at;
    }
    return ended_at - started_at;
}

int main(int argc, char** argv) {
    int num_threads = argc == 3 ? atoi(argv[1]) : 0;
    size_t share = num_threads > 0 ? (size_t)atoll(argv[2]) / num_threads / (4 * WIDTH) * (4 * WIDTH) : 0;
    if (num_threads < 1 || num_threads > MAX_THREADS || share == 0) return 2;
    pthread_barrier_t barrier;
    pthread_barrier_init(&barrier, NULL, num_threads + 1);
    static struct thread threads[MAX_THREADS];
    for (int i = 0; i < num_threads; i++) {
        threads[i] = (struct thread){.barrier = &barrier, .num_bytes = share, .bytes = aligned_alloc(WIDTH, share)};
        if (threads[i].bytes == NULL || pthread_create(&threads[i].handle, NULL, run, &threads[i]) != 0) return 1;
    }
    double best_s[2] = {1e9, 1e9};
    for (int round = 0; round < NUM_ROUNDS; round++) {
        for (int kind = 0; kind < 2; kind++) {
            pthread_barrier_wait(&barrier);
            pthread_barrier_wait(&barrier);
            double seconds = duration_s(threads, num_threads);
            if (seconds < best_s[kind]) best_s[kind] = seconds;
        }
    }
    uint64_t sink = 0;
    for (int i = 0; i < num_threads; i++) {
        pthread_join(threads[i].handle, NULL);
        sink ^= threads[i].sink;
    }
    double products = (double)(NUM_PRODUCTS / NUM_ACCUMULATORS) * NUM_ACCUMULATORS * WIDTH;
    printf("{\"read_bytes_per_s\": %.6g, \"int8_products_per_s\": %.6g, \"sink\": %d}\n",
           share * num_threads / best_s[0], products * num_threads / best_s[1], (int)(sink & 1));
    return 0;
}
