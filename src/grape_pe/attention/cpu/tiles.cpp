// Attention with a bias, tile by tile, forward and backward, on the CPU.
//
// A tile is BK keys x BQ queries and lies key-major, queries along the lanes: so the path sum, the
// softmax and every per-query quantity are plain vertical vector arithmetic, and of the five matrix
// products none needs its operands packed except the block of queries. Nothing is ever T x T.
//
// A tile is skipped when the masks hide it, or when an upper bound of every logit in it lies `tau`
// below what its row already holds (docs/attention.md proves that this is below rounding).
//
// C ABI, no torch headers: the arrays are described by `Problem`, mirrored in native/__init__.py.
// Letters: B batch, H query heads, T tokens, R slope terms, P probe features.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "simd.h"

constexpr int BQ = 64, BK = 64;
constexpr int TILE = BQ * BK;
constexpr float HELD = 1.25f;  // a row's sum of exp below this: one key has 4/5 of the weight
const float INF = std::numeric_limits<float>::infinity();

struct Problem {
    int64_t B, H, KV, Tq, Tk, D, Dv, R, P, Pw;  // Pw: row width of the probes, P padded to a vector
    int64_t causal, window, bounded, threads, splits, want_slope, want_c;
    float scale, tau;                            // tau < 0: no pruning
    const float *q, *k, *v;                      // (B,H,Tq,D) (B,KV,Tk,D) (B,KV,Tk,Dv)
    const float *cq_high, *cq_low, *ck_high, *ck_low;  // (R,B,H,T)
    const float *rate_q, *rate_k;                // (R,B,H,T); rate_k may be null
    const float *probe_q, *probe_k, *path_rate;  // (B,H,T,Pw) (B,H,T,Pw) (H)
    const int32_t *documents;                    // (B,Tk) or null
    const uint8_t *padding;                      // (B,Tk) or null
    const float *q_norm, *k_norm;                // (B,H,Tq) scaled, (B,KV,tiles) of k
    const float *c_max_high, *c_max_low, *c_min_high, *c_min_low, *rate_min, *rate_max;  // (R,B,H,tiles)
    const int64_t *order;                        // heads (b,h), the most work first
    float *out, *norms;                          // (B,H,Tq,Dv); (B,H,Tq,2): a row's maximum and its sum of exp
    int64_t *work;                               // (B,H,2): tiles computed, tiles the masks leave
    const float *d_out;                          // (B,H,Tq,Dv)
    float *d_q, *d_k, *d_v;                      // (B,H,Tq,D) (splits,B,H,Tk,D) (splits,B,H,Tk,Dv)
    double *d_cq, *d_ck, *d_rate_q, *d_rate_k;   // (R,B,H,Tq) (splits,R,B,H,Tk) and the same
    float *d_probe_q, *d_probe_k;                // (B,H,Tq,Pw) (splits,B,H,Tk,Pw)
    double *d_path_rate;                         // (splits,B,H)
};

// One head's block of queries, and everything a tile of it needs.
struct Block {
    const Problem &p;
    long b, h, bh, t0, nt, token, tiles;  // nt queries, the first being `token`; tiles: key tiles in all
    int nv, lanes_used;                   // vectors and lanes that hold those queries
    const float *k, *v;
    float path_rate = 0;
    std::vector<float> qT, probeT, s, path, z;
    alignas(64) float m[BQ], l[BQ];               // of each row: maximum and sum of exp, so far or final
    alignas(64) float sum_high[BQ], sum_low[BQ];  // path: sum of psi(t, l) over the l to the right

    Block(const Problem &p)
        : p(p), tiles((p.Tk + BK - 1) / BK), qT(p.D * BQ), probeT(p.P * BQ), s(TILE), path(TILE), z(TILE) {}

    void select(long head, long block) {
        bh = head; b = head / p.H; h = head % p.H;
        t0 = block * BQ; nt = std::min<long>(BQ, p.Tq - t0); token = t0 + p.Tk - p.Tq;
        nv = (nt + W - 1) / W; lanes_used = nv * W;
        long kv = b * p.KV + h / (p.H / p.KV);
        k = p.k + kv * p.Tk * p.D;
        v = p.v + kv * p.Tk * p.Dv;
        transpose(p.q + (bh * p.Tq + t0) * p.D, p.D, p.D, p.scale, qT.data());
        if (p.P) {
            path_rate = p.path_rate[h];
            transpose(p.probe_q + (bh * p.Tq + t0) * p.Pw, p.P, p.Pw, 1.0f / p.P, probeT.data());
            std::fill(sum_high, sum_high + BQ, 0.0f);
            std::fill(sum_low, sum_low + BQ, 0.0f);
        }
    }

    // rows (nt x width) -> lanes (width x BQ), zero beyond nt
    void transpose(const float *rows, long width, long stride, float factor, float *lanes) const {
        for (long d = 0; d < width; d++) {
            for (long t = 0; t < nt; t++) lanes[d * BQ + t] = rows[t * stride + d] * factor;
            for (long t = nt; t < BQ; t++) lanes[d * BQ + t] = 0;
        }
    }

    long first_tile() const {
        return p.window ? std::max<long>(0, token - p.window + 1) / BK : 0;
    }
    long end_tile() const {
        long last = p.Tk - 1;
        if (p.causal) last = std::min(last, token + nt - 1);
        else if (p.window) last = std::min(last, token + nt - 1 + p.window - 1);
        return last < 0 ? 0 : last / BK + 1;
    }

    struct Sight { bool none, whole; };

    // What the masks leave of a tile: nothing, all, or a part.
    Sight sight(long j0, long nj) const {
        bool whole = nt == lanes_used;
        if (p.causal) whole = whole && j0 + nj - 1 <= token;
        if (p.window) {
            whole = whole && token + nt - 1 - j0 < p.window && j0 + nj - 1 - token < p.window;
            if (token - (j0 + nj - 1) >= p.window || j0 - (token + nt - 1) >= p.window) return {true, false};
        }
        if (p.documents) {
            const int32_t *doc = p.documents + b * p.Tk;
            auto mine = std::minmax_element(doc + token, doc + token + nt);
            auto theirs = std::minmax_element(doc + j0, doc + j0 + nj);
            if (*mine.first > *theirs.second || *theirs.first > *mine.second) return {true, false};
            whole = whole && *mine.first == *mine.second && *theirs.first == *theirs.second;
        }
        if (p.padding) {
            const uint8_t *pad = p.padding + b * p.Tk + j0;
            long hidden = 0;
            for (long j = 0; j < nj; j++) hidden += pad[j] != 0;
            if (hidden == nj) return {true, false};
            whole = whole && hidden == 0;
        }
        return {false, whole};
    }

    // Sound for any sign of rate and offset: a product over a rectangle is largest at a corner.
    vf slope_bound(long r, long kb, int n) const {
        long row = (r * p.B * p.H + bh) * p.Tq + t0, tile = (r * p.B * p.H + bh) * tiles + kb;
        vf high = lanes(p.cq_high + row, n), low = lanes(p.cq_low + row, n), rate = lanes(p.rate_q + row, n);
        vf far = (all(p.c_min_high[tile]) - high) + (all(p.c_min_low[tile]) - low);
        vf near = (all(p.c_max_high[tile]) - high) + (all(p.c_max_low[tile]) - low);
        vf least = rate + all(p.rate_min[tile]), most = rate + all(p.rate_max[tile]);
        vf bound = vmax(vmax(least * far, least * near), vmax(most * far, most * near));
        return bound + (least + most + far + near) * vf{};  // a NaN or an infinity forbids pruning
    }

    vf lanes(const float *x, int n) const {
        if (n * W + W <= nt) return load(x + n * W);
        vf y = {};
        for (int i = 0; i < W && n * W + i < nt; i++) y[i] = x[n * W + i];
        return y;
    }

    // True when no row can get anything from the tile that survives rounding. `held` is a lower bound of
    // what each row has: its running maximum, or in the backward pass its logsumexp.
    bool negligible(long kb, const float *held, float k_norm) const {
        if (p.tau < 0 || (p.P && !(path_rate >= 0))) return false;
        for (int n = 0; n < nv; n++) {
            vf bound = lanes(p.q_norm + bh * p.Tq + t0, n) * all(k_norm);
            for (long r = 0; r < p.R; r++) bound += slope_bound(r, kb, n);
            if (p.P) bound += all(path_rate) * load(sum_high + n * W);
            bound += vabs(bound) * all(1e-5f) + all(1e-3f);  // the bound's own rounding
            vi keep = ~(bound < load(held + n * W) - all(p.tau));
            vi real = iota() + alli(n * W) < alli((int)nt);
            if (any(keep & real)) return false;
        }
        return true;
    }

    float k_norm(long kb) const {
        return p.tau < 0 ? 0 : p.k_norm[(b * p.KV + h / (p.H / p.KV)) * tiles + kb];
    }
    float worst_k_norm(long first, long end) const {
        float worst = 0;
        for (long kb = first; kb < end; kb++) {
            float x = k_norm(kb);
            if (!(x <= worst)) worst = x;
            if (worst != worst) return worst;
        }
        return worst;
    }

    // z(t, l) of the tile; then path[j] = sum of psi(t, l) for l = j+1 … t, and the running sums move on.
    void scan_path(long j0, long nj) {
        gemm(nj, lanes_used, p.P, p.probe_k + (bh * p.Tk + j0) * p.Pw, p.Pw, 1, probeT.data(), BQ, z.data(), BQ, false);
        for (int n = 0; n < nv; n++) {
            vf high = load(sum_high + n * W), low = load(sum_low + n * W), chunk = {};
            vi t = iota() + alli((int)token + n * W);
            for (long j = nj - 1; j >= 0; j--) {
                store(path.data() + j * BQ + n * W, high + (low + chunk));
                vf psi = link(load(z.data() + j * BQ + n * W), p.bounded);
                if (j0 + j > token) psi = t >= alli((int)(j0 + j)) ? psi : vf{};
                chunk += psi;
                if (j % 8 == 0) { add_exactly(high, low, chunk); chunk = vf{}; }
            }
            store(sum_high + n * W, high);
            store(sum_low + n * W, low);
        }
    }

    void add_slope(long r, long j0, long nj) {
        long row = (r * p.B * p.H + bh) * p.Tq + t0, col = (r * p.B * p.H + bh) * p.Tk + j0;
        for (int n = 0; n < nv; n++) {
            vf high = lanes(p.cq_high + row, n), low = lanes(p.cq_low + row, n), rate = lanes(p.rate_q + row, n);
            for (long j = 0; j < nj; j++) {
                vf offset = (all(p.ck_high[col + j]) - high) + (all(p.ck_low[col + j]) - low);
                vf both = p.rate_k ? rate + all(p.rate_k[col + j]) : rate;
                float *at = s.data() + j * BQ + n * W;
                store(at, load(at) + both * offset);
            }
        }
    }

    void hide(long j0, long nj) {
        for (long j = 0; j < nj; j++) {
            long key = j0 + j;
            bool padded = p.padding && p.padding[b * p.Tk + key];
            for (int n = 0; n < nv; n++) {
                vi t = iota() + alli((int)token + n * W), seen = t < alli((int)(token + nt));
                if (p.causal) seen &= t >= alli((int)key);
                if (p.window) seen &= (t - alli((int)key) < alli((int)p.window)) & (alli((int)key) - t < alli((int)p.window));
                if (p.documents) {
                    const int32_t *doc = p.documents + b * p.Tk;
                    vi own = {};
                    for (int i = 0; i < W && n * W + i < nt; i++) own[i] = doc[token + n * W + i];
                    seen &= own == alli(doc[key]);
                }
                if (padded) seen = vi{};
                float *at = s.data() + j * BQ + n * W;
                store(at, seen ? load(at) : all(-INF));
            }
        }
    }

    // s = the tile's logits. With a path, scan_path(j0, nj) came before.
    void logits(long j0, long nj, bool whole) {
        gemm(nj, lanes_used, p.D, k + j0 * p.D, p.D, 1, qT.data(), BQ, s.data(), BQ, false);
        for (long r = 0; r < p.R; r++) add_slope(r, j0, nj);
        if (p.P)
            for (long j = 0; j < nj; j++)
                for (long i = j * BQ; i < j * BQ + lanes_used; i += W)
                    store(s.data() + i, load(s.data() + i) + all(path_rate) * load(path.data() + i));
        if (!whole) hide(j0, nj);
    }
};

// ---------------------------------------------------------------------------------------- forward

struct Forward : Block {
    std::vector<float> oT;
    explicit Forward(const Problem &p) : Block(p), oT(p.Dv * BQ) {}

    // Online softmax over the tile in s, which becomes the weights; oT is rescaled to the new maximum.
    void soften(long nj) {
        for (int n = 0; n < nv; n++) {
            vf old = load(m + n * W), top = old;
            float *col = s.data() + n * W;
            for (long j = 0; j < nj; j++) top = vmax(load(col + j * BQ), top);
            vf base = top == all(-INF) ? vf{} : top, total = {};
            for (long j = 0; j < nj; j++) {
                vf w = vexp(load(col + j * BQ) - base);
                store(col + j * BQ, w);
                total += w;
            }
            vf shrink = vexp(old - base);
            store(l + n * W, load(l + n * W) * shrink + total);
            store(m + n * W, top);
            if (any(shrink != all(1.0f)))
                for (long d = 0; d < p.Dv; d++)
                    store(oT.data() + d * BQ + n * W, load(oT.data() + d * BQ + n * W) * shrink);
        }
    }

    void finish() {
        float *out = p.out + (bh * p.Tq + t0) * p.Dv;
        for (long t = 0; t < nt; t++) {
            bool blind = m[t] == -INF && l[t] == 0;
            p.norms[(bh * p.Tq + t0 + t) * 2] = blind ? INF : m[t];
            p.norms[(bh * p.Tq + t0 + t) * 2 + 1] = blind ? 1 : l[t];
            float inverse = blind ? 0 : 1 / l[t];
            for (long d = 0; d < p.Dv; d++) out[t * p.Dv + d] = oT[d * BQ + t] * inverse;
        }
    }

    void run(long head, long block) {
        select(head, block);
        std::fill(m, m + BQ, -INF);
        std::fill(l, l + BQ, 0.0f);
        std::fill(oT.begin(), oT.end(), 0.0f);
        long computed = 0, visible = 0, first = first_tile();
        bool stopped = false;
        float worst = p.P && !p.R && p.tau >= 0 ? worst_k_norm(first, end_tile()) : 0;
        for (long kb = end_tile() - 1; kb >= first; kb--) {
            long j0 = kb * BK, nj = std::min<long>(BK, p.Tk - j0);
            Sight seen = sight(j0, nj);
            visible += !seen.none;
            // A path only falls leftwards: once negligible against the largest key, all the rest is.
            if (p.P && !p.R && !stopped) stopped = negligible(kb, m, worst);
            if (stopped) continue;
            bool skip = seen.none || negligible(kb, m, k_norm(kb));
            if (p.P) scan_path(j0, nj);
            if (skip) continue;
            computed++;
            logits(j0, nj, seen.whole);
            soften(nj);
            gemm(p.Dv, lanes_used, nj, v + j0 * p.Dv, 1, p.Dv, s.data(), BQ, oT.data(), BQ, true);
        }
        finish();
#pragma omp atomic
        p.work[bh * 2] += computed;
#pragma omp atomic
        p.work[bh * 2 + 1] += visible;
    }
};

// --------------------------------------------------------------------------------------- backward

struct Backward : Block {
    std::vector<float> dOT, dp, dz, q_scaled, dq, dpq, boundary;
    alignas(64) float before_high[BQ], before_low[BQ];  // path: sum of dS(t, j) over the j to the left
    alignas(64) float lse[BQ], delta[BQ];
    std::vector<double> rate_sum, c_sum, rate_mean;  // (R, BQ)
    std::vector<uint8_t> todo;
    double drift[BQ], path_sum[BQ], path_mean[BQ];
    long held_key[BQ];  // the key that holds a row, or -1, and its weight
    float held_weight[BQ];
    long split = 0;
    double d_rate = 0;

    explicit Backward(const Problem &p)
        : Block(p), dOT(p.Dv * BQ), dp(TILE), dz(TILE), q_scaled(BQ * p.D), dq(BQ * p.D), dpq(BQ * p.Pw),
          boundary(p.P ? tiles * BQ * 2 : 0), rate_sum(p.R * BQ), c_sum(p.R * BQ), rate_mean(p.R * BQ),
          todo(tiles) {}

    // Which tiles to compute and, with a path, the sums at each tile's right edge.
    void plan(long first, long end) {
        bool stopped = false;
        float worst = p.P && !p.R && p.tau >= 0 ? worst_k_norm(first, end) : 0;
        for (long kb = end - 1; kb >= first; kb--) {
            long j0 = kb * BK, nj = std::min<long>(BK, p.Tk - j0);
            todo[kb] = 0;
            if (p.P && !p.R && !stopped) stopped = negligible(kb, lse, worst);
            if (stopped) continue;
            Sight seen = sight(j0, nj);
            todo[kb] = seen.none || negligible(kb, lse, k_norm(kb)) ? 0 : seen.whole ? 2 : 1;
            if (!p.P) continue;
            memcpy(&boundary[kb * 2 * BQ], sum_high, sizeof sum_high);
            memcpy(&boundary[(kb * 2 + 1) * BQ], sum_low, sizeof sum_low);
            if (kb > first) scan_path(j0, nj);
        }
    }

    static void add_lanes(double *to, int n, vf x) {
        for (int i = 0; i < W; i++) to[n * W + i] += x[i];
    }

    // delta, so far <dO, O>, is the mean of dP under the weights. Where one key holds a row, dS is a difference
    // of two numbers that agree in nearly every digit: there delta is formed from the dP it is taken from,
    // so that the rounding of dP cancels as it does in a dense softmax. That takes all of a row's tiles: free
    // for a block that has one, a second pass over logits and dP for a block of which half the rows are such.
    bool held_by_one_key() const {
        long held = 0;
        for (long t = 0; t < nt; t++) held += l[t] < HELD && m[t] < INF;
        return 2 * held >= nt;
    }

    void add_mean(long nj, double *sum) const {  // s, dp: a tile of logits and dP
        for (int n = 0; n < nv; n++) {
            vf top = load(m + n * W), inverse = all(1.0f) / load(l + n * W), mean = {};
            for (long j = 0; j < nj; j++) {
                long i = j * BQ + n * W;
                mean += vexp(load(s.data() + i) - top) * inverse * load(dp.data() + i);
            }
            add_lanes(sum, n, mean);
        }
    }

    void renew_delta(long first, long end) {
        double sum[BQ] = {};
        for (long kb = first; kb < end; kb++) {
            if (!todo[kb]) continue;
            long j0 = kb * BK, nj = std::min<long>(BK, p.Tk - j0);
            recompute(kb, j0, nj);
            add_mean(nj, sum);
        }
        for (long t = 0; t < nt; t++) delta[t] = sum[t];
    }

    // s, dp: the tile's logits and dP; with a path also its sums.
    void recompute(long kb, long j0, long nj) {
        if (p.P) {
            memcpy(sum_high, &boundary[kb * 2 * BQ], sizeof sum_high);
            memcpy(sum_low, &boundary[(kb * 2 + 1) * BQ], sizeof sum_low);
            scan_path(j0, nj);
        }
        if (!todo[kb]) return;
        logits(j0, nj, todo[kb] == 2);
        gemm(nj, lanes_used, p.Dv, v + j0 * p.Dv, p.Dv, 1, dOT.data(), BQ, dp.data(), BQ, false);
    }

    void note_held(int n, long j0, long nj, vf most) {
        for (int i = 0; i < W; i++)
            for (long j = 0; j < nj && most[i] * HELD > 1; j++)
                if (s[j * BQ + n * W + i] == most[i]) {
                    held_key[n * W + i] = j0 + j;
                    held_weight[n * W + i] = most[i];
                }
    }

    // A row's dS adds up to `drift` instead of zero because delta was off by it, and so each dS by that times
    // its weight: where one key holds the row, that key has nearly all of it, and gives it back.
    void settle_held() {
        for (long t = 0; t < nt; t++) {
            long j = held_key[t], key = (split * p.B * p.H + bh) * p.Tk + j;
            if (j < 0) continue;
            double excess = drift[t] * held_weight[t];
            for (long d = 0; d < p.D; d++) {
                p.d_k[key * p.D + d] -= excess * q_scaled[t * p.D + d];
                dq[t * p.D + d] -= excess * k[j * p.D + d];
            }
            for (long r = 0; r < p.R && p.want_slope; r++) settle_slope(r, t, j, excess);
        }
    }

    void settle_slope(long r, long t, long j, double excess) {
        long head = r * p.B * p.H + bh, row = head * p.Tq + t0 + t, col = head * p.Tk + j;
        long out = (split * p.R + r) * p.B * p.H * p.Tk + bh * p.Tk + j;
        double offset = ((double)p.ck_high[col] - p.cq_high[row]) + ((double)p.ck_low[col] - p.cq_low[row]);
        double rate = p.rate_q[row] + (p.rate_k ? p.rate_k[col] : 0.0);
        if (p.rate_k) p.d_rate_k[out] -= excess * offset;
        if (!p.want_c) return;
        p.d_ck[out] -= excess * rate;
        c_sum[r * BQ + t] -= excess * rate;
    }

    void weights_and_slopes(long j0, long nj) {  // s -> P, dp -> dS = P (dP - delta)
        for (int n = 0; n < nv; n++) {
            vf top = load(m + n * W), inverse = all(1.0f) / load(l + n * W), mean = load(delta + n * W);
            vf total = {}, most = {};
            for (long j = 0; j < nj; j++) {
                long i = j * BQ + n * W;
                vf w = vexp(load(s.data() + i) - top) * inverse;
                store(s.data() + i, w);
                vf ds = w * (load(dp.data() + i) - mean);
                store(dp.data() + i, ds);
                total += ds;
                most = vmax(most, w);
            }
            add_lanes(drift, n, total);
            if (any(most * all(HELD) > all(1.0f))) note_held(n, j0, nj, most);
        }
    }

    void rate_gradient(long r, long j0, long nj) {
        long head = r * p.B * p.H + bh, row = head * p.Tq + t0, col = head * p.Tk + j0;
        vf key[BK];
        for (long j = 0; j < nj; j++) key[j] = vf{};
        for (int n = 0; n < nv; n++) {
            vf high = lanes(p.cq_high + row, n), low = lanes(p.cq_low + row, n), sum = {}, mean = {};
            for (long j = 0; j < nj; j++) {
                vf offset = (all(p.ck_high[col + j]) - high) + (all(p.ck_low[col + j]) - low);
                vf moved = load(dp.data() + j * BQ + n * W) * offset;
                sum += moved;
                mean += load(s.data() + j * BQ + n * W) * offset;
                key[j] += moved;
            }
            add_lanes(&rate_sum[r * BQ], n, sum);
            add_lanes(&rate_mean[r * BQ], n, mean);
        }
        double *out = p.d_rate_k + (split * p.R + r) * p.B * p.H * p.Tk + bh * p.Tk + j0;
        for (long j = 0; j < nj && p.rate_k; j++) out[j] += hsum(key[j]);
    }

    // What a pair adds at its key it takes away at its query. A cumulative sum may stand behind c and would
    // add up any difference between the two, so both are summed in double from the same rounded product.
    void c_gradient(long r, long j0, long nj) {
        long head = r * p.B * p.H + bh, row = head * p.Tq + t0, col = head * p.Tk + j0;
        vd key[BK];
        for (long j = 0; j < nj; j++) key[j] = vd{};
        for (int n = 0; n < nv; n++) {
            vf own = lanes(p.rate_q + row, n);
            vd sum = {};
            for (long j = 0; j < nj; j++) {
                vf rate = p.rate_k ? own + all(p.rate_k[col + j]) : own;
                vd held = __builtin_convertvector(load(dp.data() + j * BQ + n * W) * rate, vd);
                sum += held;
                key[j] += held;
            }
            for (int i = 0; i < W; i++) c_sum[r * BQ + n * W + i] += sum[i];
        }
        double *out = p.d_ck + (split * p.R + r) * p.B * p.H * p.Tk + bh * p.Tk + j0;
        for (long j = 0; j < nj; j++)
            for (int i = 0; i < W; i++) out[j] += key[j][i];
    }

    // A row's dS adds up to zero; what rounding leaves (drift) would be magnified by the row's mean offset,
    // so it is taken back with the row's weights: the same as forming delta from the very dP summed here.
    void finish_bias() {
        for (long r = 0; r < p.R && p.want_slope; r++)
            for (long t = 0; t < nt; t++) {
                long row = (r * p.B * p.H + bh) * p.Tq + t0 + t, i = r * BQ + t;
                p.d_rate_q[row] = rate_sum[i] - drift[t] * rate_mean[i];
                if (p.want_c) p.d_cq[row] = -c_sum[i];
            }
        for (long t = 0; t < nt && p.P; t++) d_rate += path_sum[t] - drift[t] * path_mean[t];
    }

    // d psi(t, l) = rate * sum of dS(t, j) over j < l, from the left; then through the link to the probes.
    void path_gradient(long j0, long nj, bool computed) {
        vf rate = all(path_rate / p.P);
        for (int n = 0; n < nv; n++) {
            vf of_rate = {}, mean_rate = {};
            vf high = load(before_high + n * W), low = load(before_low + n * W), chunk = {};
            vi t = iota() + alli((int)token + n * W);
            for (long j = 0; j < nj; j++) {
                long i = j * BQ + n * W;
                vf d = rate * (high + (low + chunk)) * link_slope(load(z.data() + i), p.bounded);
                store(dz.data() + i, t >= alli((int)(j0 + j)) ? d : vf{});
                if (!computed) continue;
                vf ds = load(dp.data() + i);
                of_rate += ds * load(path.data() + i);
                mean_rate += load(s.data() + i) * load(path.data() + i);
                chunk += ds;
                if (j % 8 == 7) { add_exactly(high, low, chunk); chunk = vf{}; }
            }
            add_exactly(high, low, chunk);
            store(before_high + n * W, high);
            store(before_low + n * W, low);
            add_lanes(path_sum, n, of_rate);
            add_lanes(path_mean, n, mean_rate);
        }
        const float *key = p.probe_k + (bh * p.Tk + j0) * p.Pw;
        float *d_key = p.d_probe_k + ((split * p.B * p.H + bh) * p.Tk + j0) * p.Pw;
        gemm(nj, p.Pw, nt, dz.data(), BQ, 1, p.probe_q + (bh * p.Tq + t0) * p.Pw, p.Pw, d_key, p.Pw, true);
        gemm(nt, p.Pw, nj, dz.data(), 1, BQ, key, p.Pw, dpq.data(), p.Pw, true);
    }

    bool anything_before() const {
        for (int t = 0; t < BQ; t++)
            if (before_high[t] != 0 || before_low[t] != 0) return true;
        return false;
    }

    void tile(long kb, bool alone) {
        long j0 = kb * BK, nj = std::min<long>(BK, p.Tk - j0), to = split * p.B * p.H + bh;
        bool path = p.P && j0 <= token + nt - 1 && (todo[kb] || anything_before());
        if (!todo[kb] && !path) return;
        recompute(kb, j0, nj);
        if (todo[kb]) {
            const float *d_out = p.d_out + (bh * p.Tq + t0) * p.Dv;
            if (alone) {
                double sum[BQ] = {};
                add_mean(nj, sum);
                std::copy(sum, sum + nt, delta);
            }
            weights_and_slopes(j0, nj);
            gemm(nj, p.Dv, nt, s.data(), BQ, 1, d_out, p.Dv, p.d_v + (to * p.Tk + j0) * p.Dv, p.Dv, true);
            gemm(nj, p.D, nt, dp.data(), BQ, 1, q_scaled.data(), p.D, p.d_k + (to * p.Tk + j0) * p.D, p.D, true);
            gemm(nt, p.D, nj, dp.data(), 1, BQ, k + j0 * p.D, p.D, dq.data(), p.D, true);
            if (p.want_slope)
                for (long r = 0; r < p.R; r++) {
                    rate_gradient(r, j0, nj);
                    if (p.want_c) c_gradient(r, j0, nj);
                }
        }
        if (path) path_gradient(j0, nj, todo[kb]);
    }

    void start_rows(long row) {
        for (long t = 0; t < BQ; t++) {
            double sum = 0;
            for (long d = 0; t < nt && d < p.Dv; d++)
                sum += (double)p.d_out[(row + t) * p.Dv + d] * p.out[(row + t) * p.Dv + d];
            delta[t] = sum;
            m[t] = t < nt ? p.norms[(row + t) * 2] : INF;
            l[t] = t < nt ? p.norms[(row + t) * 2 + 1] : 1;
            lse[t] = m[t] + std::log(l[t]);
            before_high[t] = before_low[t] = 0;
            drift[t] = path_sum[t] = path_mean[t] = 0;
            held_key[t] = -1;
        }
        for (auto *sums : {&rate_sum, &c_sum, &rate_mean}) std::fill(sums->begin(), sums->end(), 0.0);
    }

    void run(long head, long block) {
        select(head, block);
        long row = bh * p.Tq + t0;
        start_rows(row);
        transpose(p.d_out + row * p.Dv, p.Dv, p.Dv, 1, dOT.data());
        for (long i = 0; i < nt * p.D; i++) q_scaled[i] = p.q[row * p.D + i] * p.scale;
        std::fill(dq.begin(), dq.end(), 0.0f);
        std::fill(dpq.begin(), dpq.end(), 0.0f);
        long first = first_tile(), end = end_tile();
        plan(first, end);
        bool alone = end - first == std::count(todo.begin() + first, todo.begin() + end, 0) + 1;
        if (!alone && held_by_one_key()) renew_delta(first, end);
        for (long kb = first; kb < end; kb++) tile(kb, alone);
        settle_held();
        finish_bias();
        for (long i = 0; i < nt * p.D; i++) p.d_q[row * p.D + i] = dq[i] * p.scale;
        if (p.P)
            for (long i = 0; i < nt * p.Pw; i++) p.d_probe_q[row * p.Pw + i] = dpq[i];
    }
};

extern "C" void grape_forward(const Problem *problem) {
    const Problem &p = *problem;
    long blocks = (p.Tq + BQ - 1) / BQ, jobs = p.B * p.H * blocks;
#pragma omp parallel num_threads(p.threads)
    {
        Forward forward(p);
#pragma omp for schedule(dynamic, 1)
        for (long job = 0; job < jobs; job++)  // a head's keys stay in cache; its longest rows first
            forward.run(job / blocks, blocks - 1 - job % blocks);
    }
}

extern "C" void grape_backward(const Problem *problem) {
    const Problem &p = *problem;
    long blocks = (p.Tq + BQ - 1) / BQ, jobs = p.B * p.H * p.splits;
#pragma omp parallel num_threads(p.threads)
    {
        Backward backward(p);
#pragma omp for schedule(dynamic, 1)
        for (long job = 0; job < jobs; job++) {
            long head = p.order[job / p.splits];
            backward.split = job % p.splits;
            backward.d_rate = 0;
            for (long block = backward.split; block < blocks; block += p.splits) backward.run(head, block);
            if (p.P) p.d_path_rate[backward.split * p.B * p.H + head] = backward.d_rate;
        }
    }
}
