// Attention of a few queries over many keys, without gradients: decoding.
//
// The bias comes as one row of numbers for each query, -inf where a key is hidden. Keys are read where they lie (a
// cache's storage, any strides), in float32, bfloat16 or float16, and multiplied in float32. A job is BLOCK keys of one
// key head with all the queries that read it, so threads share the work evenly whatever the heads skip.
//
// A head reads its keys from the first one whose logit can come within `tau` of a row's own: no logit exceeds
// |q| max|k| plus its bias, and the newest key's logit is known exactly.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "simd.h"

constexpr long BLOCK = 256;
constexpr long SMALL = 1 << 17;  // products up to which one thread takes less time than waking others
static const float NONE = -std::numeric_limits<float>::infinity();

struct Decode {
    int64_t B, H, KV, Tq, Tk, D, Dv, threads;
    int64_t q_stride[3], k_stride[3], v_stride[3], row_stride[3];  // of batch, head and token; features are adjacent
    float scale, tau;                                              // tau < 0: read all keys
    const void *q, *k, *v;
    const float *rows, *bound;                                     // (B,H,Tq,Tk) or null; (B,KV), no |k| is larger
    float *out;                                                    // (B,H,Tq,Dv)
    int64_t *read;                                                 // (B,KV): keys read

    long group() const { return H / KV; }
    const float *row(long b, long h, long t) const {
        return rows + b * row_stride[0] + h * row_stride[1] + t * row_stride[2];
    }
};

struct Half { uint16_t bits; };
struct Brain { uint16_t bits; };
typedef uint16_t vh __attribute__((vector_size(W * 2)));

static inline vf widen(const float *x) { return load(x); }
static inline vi low_bits(const void *x) {
    vh h;
    memcpy(&h, x, sizeof h);
    return __builtin_convertvector(h, vi);
}
static inline vf widen(const Brain *x) { return from_bits(low_bits(x) << 16); }
static inline vf widen(const Half *x) {
    vi h = low_bits(x), magnitude = (h & alli(0x7fff)) << 13, sign = (h & alli(0x8000)) << 16;
    vf value = from_bits(magnitude) * all(0x1p112f);  // moves the exponent; exact for subnormal numbers too
    vi special = (h & alli(0x7c00)) == alli(0x7c00);
    return from_bits((special ? magnitude | alli(0x7f800000) : bits(value)) | sign);
}

// A row of n numbers in float32, with zeros up to whole vectors.
template <class T>
static inline void widen_row(const T *x, long n, float *to) {
    long i = 0;
    for (; i + W <= n; i += W) store(to + i, widen(x + i));
    if (i == n) return;
    T rest[W] = {};
    std::copy(x + i, x + n, rest);
    store(to + i, widen(rest));
}

static inline float dot(const float *a, const float *b, long n) {
    vf sum = {};
    for (long i = 0; i < n; i += W) sum += load(a + i) * load(b + i);
    return hsum(sum);
}

static long whole(long n) { return (n + W - 1) / W * W; }

// One key head of one sequence: its queries, scaled, and the first key they need.
template <class T>
struct Head {
    const Decode &p;
    long b, kv, count, width, value_width;  // count: queries that read these keys
    const T *k, *v;
    std::vector<float> q;
    long first = 0;

    Head(const Decode &p, long b, long kv)
        : p(p), b(b), kv(kv), count(p.group() * p.Tq), width(whole(p.D)), value_width(whole(p.Dv)),
          k((const T *)p.k + b * p.k_stride[0] + kv * p.k_stride[1]),
          v((const T *)p.v + b * p.v_stride[0] + kv * p.v_stride[1]), q(count * width) {
        for (long r = 0; r < count; r++) {
            const T *from = (const T *)p.q + b * p.q_stride[0] + head(r) * p.q_stride[1] + r % p.Tq * p.q_stride[2];
            widen_row(from, p.D, &q[r * width]);
            for (long d = 0; d < p.D; d++) q[r * width + d] *= p.scale;
        }
        if (p.tau >= 0) find_first();
    }

    long head(long r) const { return kv * p.group() + r / p.Tq; }
    const float *row(long r) const { return p.row(b, head(r), r % p.Tq); }

    static vi matters(const float *bias, vf need) { return ~(load(bias) < need); }  // a NaN does

    void find_first() {
        std::vector<float> key(width);
        first = p.Tk - p.Tq;
        for (long r = 0; r < count; r++) {
            const float *x = &q[r * width], *bias = row(r);
            long own = p.Tk - p.Tq + r % p.Tq, j = 0;
            widen_row(k + own * p.k_stride[2], p.D, key.data());
            float bound = std::sqrt(dot(x, x, width)) * p.bound[b * p.KV + kv] * (1 + 1e-5f);
            vf need = all(dot(x, key.data(), width) + bias[own] - bound - p.tau);
            while (j + 4 * W <= first && !any(matters(bias + j, need) | matters(bias + j + W, need) |
                                              matters(bias + j + 2 * W, need) | matters(bias + j + 3 * W, need)))
                j += 4 * W;
            while (j + W <= first && !any(matters(bias + j, need))) j += W;
            while (j < first && bias[j] < need[0]) j++;
            first = std::min(first, j);
        }
    }
};

// What one block of keys gives each query: largest logit, sum of weights, weighted sum of values.
template <class T>
static void attend_block(const Head<T> &head, long j0, long n, float *results) {
    const Decode &p = head.p;
    const long width = head.width, dv = head.value_width, size = dv + 2;
    alignas(64) float logits[BLOCK];
    std::vector<float> all_logits, row(std::max(width, dv));
    all_logits.resize(head.count * BLOCK);
    for (long j = 0; j < n; j++) {
        const T *from = head.k + (j0 + j) * p.k_stride[2];
        const float *key = row.data();
        if (sizeof(T) == sizeof(float) && p.D == width) key = (const float *)from;
        else widen_row(from, p.D, row.data());
        for (long r = 0; r < head.count; r++) all_logits[r * BLOCK + j] = dot(&head.q[r * width], key, width);
    }
    for (long r = 0; r < head.count; r++) {
        float *result = results + r * size, largest = NONE;
        float *x = &all_logits[r * BLOCK];
        const float *bias = p.rows ? head.row(r) + j0 : nullptr;
        for (long j = 0; j < n; j++) {
            if (bias) x[j] += bias[j];
            largest = x[j] > largest || x[j] != x[j] ? x[j] : largest;
        }
        for (long j = n; j < whole(n); j++) x[j] = NONE;
        vf sum = {}, shift = all(largest == NONE ? 0 : largest);
        for (long j = 0; j < n; j += W) {
            vf weight = vexp(load(x + j) - shift);
            store(logits + j, weight);
            sum += weight;
        }
        result[0] = largest;
        result[1] = hsum(sum);
        std::fill(result + 2, result + size, 0.0f);
        for (long d = 0; d < dv; d += 4 * W) {
            const long vectors = std::min<long>(4, (dv - d) / W);
            vf acc[4] = {};
            for (long j = 0; j < n; j++) {
                const T *from = head.v + (j0 + j) * p.v_stride[2] + d;
                vf weight = all(logits[j]);
                if (d + vectors * W <= p.Dv) {
                    for (long i = 0; i < vectors; i++) acc[i] += weight * widen(from + i * W);
                } else {
                    widen_row(from, p.Dv - d, row.data());
                    for (long i = 0; i < vectors; i++) acc[i] += weight * load(&row[i * W]);
                }
            }
            for (long i = 0; i < vectors; i++) store(result + 2 + d + i * W, acc[i]);
        }
    }
}

// The mean of the blocks of one query by their weights; false if it is not finite or no key is visible.
static bool join(const float *results, long blocks, long stride, long dv, float *out) {
    float largest = NONE, sum = 0;
    for (long n = 0; n < blocks; n++) largest = std::max(largest, results[n * stride]);
    std::fill(out, out + dv, 0.0f);
    for (long n = 0; n < blocks; n++) {
        const float *result = results + n * stride, weight = std::exp(result[0] - largest);
        sum += weight * result[1];
        for (long d = 0; d < dv; d++) out[d] += weight * result[2 + d];
    }
    float least = 1 / sum, check = 0;
    for (long d = 0; d < dv; d++) check += (out[d] *= least) * 0.0f;
    return check == 0 && sum > 0;
}

template <class T>
static bool attend(const Decode &p) {
    struct Job { long head, first, keys; };
    std::vector<Head<T>> heads;
    std::vector<Job> jobs;
    std::vector<long> begins;
    long keys = 0;
    for (long i = 0; i < p.B * p.KV; i++) {
        heads.emplace_back(p, i / p.KV, i % p.KV);
        begins.push_back((long)jobs.size());
        long first = heads[i].first;
        p.read[i] = p.Tk - first;
        keys += p.read[i];
        for (long j = first; j < p.Tk; j += BLOCK) jobs.push_back({i, j, std::min(BLOCK, p.Tk - j)});
    }
    begins.push_back((long)jobs.size());
    const long count = heads[0].count, size = heads[0].value_width + 2, total = (long)jobs.size();
    std::vector<float> results(total * count * size);
#pragma omp parallel for num_threads(p.threads) schedule(static) if (keys * count * p.D > SMALL)
    for (long job = 0; job < total; job++) {
        const Job &at = jobs[job];
        attend_block(heads[at.head], at.first, at.keys, &results[job * count * size]);
    }
    bool sound = true;
    for (long i = 0; i < p.B * p.KV; i++)
        for (long r = 0; r < count; r++) {
            float *out = p.out + ((heads[i].b * p.H + heads[i].head(r)) * p.Tq + r % p.Tq) * p.Dv;
            sound &= join(&results[(begins[i] * count + r) * size], begins[i + 1] - begins[i], count * size, p.Dv, out);
        }
    return sound;
}

// 1 if every row is finite and sees a key. `bytes` of q, k and v: 4 float32, 2 float16, -2 bfloat16.
extern "C" int grape_decode(const Decode *problem, int bytes) {
    if (bytes == 4) return attend<float>(*problem);
    return bytes == 2 ? attend<Half>(*problem) : attend<Brain>(*problem);
}
