// Vectors, their elementary functions and one matrix product: what tiles.cpp is written in.
//
// GCC/Clang vector extensions only, so the same text serves AVX-512, AVX, SSE and NEON. Compiled without
// -ffast-math: a NaN in the input must reach the output.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
constexpr int W = 16, NV = 4;  // lanes; vectors to a panel of the matrix product: 6 x 4 accumulators of 32 registers
#elif defined(__AVX__)
constexpr int W = 8, NV = 2;
#elif defined(__aarch64__)
constexpr int W = 4, NV = 4;
#else
constexpr int W = 4, NV = 2;
#endif

typedef float vf __attribute__((vector_size(W * 4)));
typedef double vd __attribute__((vector_size(W * 8)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef float vfu __attribute__((vector_size(W * 4), aligned(4), may_alias));

static inline vf load(const float *p) { return *(const vfu *)p; }
static inline void store(float *p, vf x) { *(vfu *)p = x; }
static inline vi loadi(const int32_t *p) { vi x; memcpy(&x, p, sizeof x); return x; }
static inline vf all(float x) { return x - vf{}; }  // x - 0 is x, which x + 0 is not: it folds to a broadcast
static inline vi alli(int32_t x) { return vi{} + x; }
static inline vi bits(vf x) { vi y; memcpy(&y, &x, sizeof y); return y; }
static inline vf from_bits(vi x) { vf y; memcpy(&y, &x, sizeof y); return y; }
static inline vf vmax(vf a, vf b) { return a > b ? a : b; }
static inline vf vmin(vf a, vf b) { return a < b ? a : b; }
static inline vf vabs(vf x) { return from_bits(bits(x) & alli(0x7fffffff)); }

static inline vi iota() {
    vi x;
    for (int i = 0; i < W; i++) x[i] = i;
    return x;
}

template <int N> struct Lanes { typedef float type __attribute__((vector_size(N * 4))); };

template <int N>
static inline float hsum_of(const typename Lanes<N>::type &x) {
    typename Lanes<N / 2>::type low, high;
    memcpy(&low, &x, sizeof low);
    memcpy(&high, (const char *)&x + sizeof low, sizeof high);
    low += high;
    if constexpr (N == 4) return low[0] + low[1];
    else return hsum_of<N / 2>(low);
}
static inline float hsum(vf x) { return hsum_of<W>(x); }

static inline bool any(vi mask) {
    int32_t found = 0;
    for (int i = 0; i < W; i++) found |= mask[i];
    return found != 0;
}

// exp to 1 ulp or so (the Cephes polynomial) for x below 88; under -87.3 exactly 0, NaN stays NaN.
static inline vf vexp(vf x) {
    const vf low = all(-87.3365f), magic = all(12582912.0f);
    vf y = x < low ? low : x;
    vf shifted = y * all(1.44269504f) + magic;
    vf n = shifted - magic;
    vf r = y - n * all(0.693359375f) + n * all(2.12194440e-4f);
    vf p = all(1.9875691500e-4f);
    p = p * r + all(1.3981999507e-3f);
    p = p * r + all(8.3334519073e-3f);
    p = p * r + all(4.1665795894e-2f);
    p = p * r + all(1.6666665459e-1f);
    p = p * r + all(5.0000001201e-1f);
    p = p * r * r + r + all(1.0f);
    vf scale = from_bits((bits(shifted) - bits(magic) + alli(127)) << 23);
    return x < low ? vf{} : p * scale;
}

// log(1 + u) for u in [0, 1], to 1.5e-7 of itself: a polynomial fitted to log(1 + u) / u, which needs no division.
static inline vf vlog1p(vf u) {
    vf p = all(-3.163999412e-3f);
    p = p * u + all(1.948768646e-2f);
    p = p * u + all(-5.626952648e-2f);
    p = p * u + all(1.053295061e-1f);
    p = p * u + all(-1.526327431e-1f);
    p = p * u + all(1.966101825e-1f);
    p = p * u + all(-2.495116740e-1f);
    p = p * u + all(3.332966566e-1f);
    p = p * u + all(-4.999988973e-1f);
    return p * u * u + u;
}

// The links g of Eq. P1, logsigmoid or (`bounded`) sigmoid - 1, and on demand their derivatives.
struct Link { vf value, slope; };

static inline Link link(vf z, bool bounded, bool with_slope) {
    vf e = vexp(-vabs(z)), r = bounded || with_slope ? all(1.0f) / (e + all(1.0f)) : vf{};
    vf falling = (z < vf{} ? all(1.0f) : e) * r;  // sigmoid(-z)
    if (bounded) return {-falling, e * r * r};
    return {vmin(z, vf{}) - vlog1p(e), falling};
}

// (high, low) += x without losing what falls off the end (two-sum).
static inline void add_exactly(vf &high, vf &low, vf x) {
    vf sum = high + x, back = sum - high, lost = (high - (sum - back)) + (x - back);
    low += sum - sum == vf{} ? lost : vf{};  // an infinite sum has lost nothing
    high = sum;
}

// c[M x N] (+)= a[M x K] b[K x N]; a has any strides (it is broadcast), b and c have contiguous rows. Where N is not
// a multiple of W, M and K must be at most GEMM_ROWS.
constexpr int GEMM_ROWS = 64;

template <int MR, int NR>
static inline void micro(const float *a, long rs, long cs, const float *b, long ldb, float *c, long ldc,
                         int K, bool add) {
    vf acc[MR][NR];
    for (int m = 0; m < MR; m++)
        for (int n = 0; n < NR; n++) acc[m][n] = vf{};
    for (int k = 0; k < K; k++) {
        vf row[NR];
        for (int n = 0; n < NR; n++) row[n] = load(b + k * ldb + n * W);
        for (int m = 0; m < MR; m++) {
            vf x = all(a[m * rs + k * cs]);
            for (int n = 0; n < NR; n++) acc[m][n] += x * row[n];
        }
    }
    // c is added last: started from c, every step would round at the size of the whole sum.
    for (int m = 0; m < MR; m++)
        for (int n = 0; n < NR; n++) {
            float *at = c + m * ldc + n * W;
            store(at, add ? load(at) + acc[m][n] : acc[m][n]);
        }
}

template <int NR>
static inline void panel(int M, int K, const float *a, long rs, long cs, const float *b, long ldb,
                         float *c, long ldc, bool add) {
    int m = 0;
    for (; m + 6 <= M && m + 8 != M; m += 6) micro<6, NR>(a + m * rs, rs, cs, b, ldb, c + m * ldc, ldc, K, add);
    for (; m + 4 <= M; m += 4) micro<4, NR>(a + m * rs, rs, cs, b, ldb, c + m * ldc, ldc, K, add);
    for (; m < M; m++) micro<1, NR>(a + m * rs, rs, cs, b, ldb, c + m * ldc, ldc, K, add);
}

static void gemm(int M, int N, int K, const float *a, long rs, long cs, const float *b, long ldb,
                 float *c, long ldc, bool add) {
    int n = 0;
    for (; n + NV * W <= N; n += NV * W) panel<NV>(M, K, a, rs, cs, b + n, ldb, c + n, ldc, add);
    for (; n + 2 * W <= N; n += 2 * W) panel<2>(M, K, a, rs, cs, b + n, ldb, c + n, ldc, add);
    for (; n + W <= N; n += W) panel<1>(M, K, a, rs, cs, b + n, ldb, c + n, ldc, add);
    if (n == N) return;
    float part_b[GEMM_ROWS * W] = {}, part_c[GEMM_ROWS * W];  // fewer columns than a vector: by padded copies
    for (int k = 0; k < K; k++) memcpy(part_b + k * W, b + k * ldb + n, (N - n) * sizeof(float));
    panel<1>(M, K, a, rs, cs, part_b, W, part_c, W, false);
    for (int m = 0; m < M; m++)
        for (int i = n; i < N; i++) c[m * ldc + i] = part_c[m * W + i - n] + (add ? c[m * ldc + i] : 0.0f);
}
