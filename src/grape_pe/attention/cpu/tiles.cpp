// Attention with a bias, tile by tile, forward and backward, on the CPU.
//
// A tile is BK keys x BQ queries and lies key-major, queries along the vector lanes: the path sum, the softmax and
// every per-query number are then vertical vector arithmetic, and no matrix product needs a packed operand except
// the block of queries. Nothing is ever T x T.
//
// A tile is skipped when the masks hide it, or when an upper bound of every logit in it lies `tau` below what its
// rows already have (docs/attention.md has the proof). A query, or a visible key, with a NaN or an infinity in q, k
// or v makes its rows NaN; a hidden one changes nothing.
//
// C ABI, no torch headers: `Problem` is mirrored in build.py, and launch.py checks every array against it.
// Letters: B batch, H query heads, KV key heads, HP probe heads, T tokens, R slope terms, P probe features,
// S tables over L distances.

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "simd.h"

constexpr int BQ = 64, BK = 64;
constexpr int TILE = BQ * BK;
constexpr int BAND = BQ + BK;  // distances of a tile whose positions run on: one less, and one to fill a vector
const float HUGEST = std::numeric_limits<float>::max();
const float INF = std::numeric_limits<float>::infinity(), NOT = std::numeric_limits<float>::quiet_NaN();

struct Problem {
    int64_t B, H, KV, HP, Tq, Tk, D, Dv, R, P, S, L;
    int64_t causal, window, sinks, bounded, threads, splits;         // window 0: none
    int64_t first, beyond;                       // distance of a table's first entry; outside: 0 last, 1 zero, 2 -inf
    int64_t cq_stride[4], ck_stride[4], rq_stride[4], rk_stride[4];  // of r, b, h, t
    float scale, tau;                            // tau < 0: no pruning
    const float *q, *k, *v;                      // (B,H,Tq,D) (B,KV,Tk,D) (B,KV,Tk,Dv)
    const double *c_q, *c_k;                     // (R,B,H,T), any strides
    const float *rate_q, *rate_k;                // (R,B,H,T), any strides, or null
    const float *probe_q, *probe_k, *path_rate;  // (B,HP,Tq,P) (B,HP,Tk,P) (H)
    const float *table, *mix;                    // (H,S,L) (B,H,Tq,S) or null
    const int64_t *place_q, *place_k;            // (B,Tq) (B,Tk)
    const int64_t *documents;                    // (B,Tk) or null
    const uint8_t *key_padding;                  // (B,Tk) or null
    float *out, *lse, *norms;                    // (B,H,Tq,Dv) (B,H,Tq) (B,H,Tq,2): maximum and sum of exp
    int64_t *work;                               // (B,H,2): tiles computed, tiles the masks leave
    double *key_norm, *slope_range;              // (B,KV,tiles) (R,B,H,tiles,4): made by the forward
    const float *d_out, *d_lse;                  // (B,H,Tq,Dv) (B,H,Tq) or null
    float *d_q, *d_k, *d_v;                      // (B,H,Tq,D) (splits,B,KV,Tk,D) (splits,B,KV,Tk,Dv)
    double *d_c_q, *d_c_k, *d_rate_q, *d_rate_k; // (R,B,H,Tq) (splits,R,B,H,Tk) and the same, or null
    float *d_probe_q, *d_probe_k;                // (B,H,Tq,P) (splits,B,H,Tk,P)
    double *d_path_rate;                         // (splits,B,H)
    double *d_table;                             // (splits,B,H,S,L)
    float *d_mix;                                // (B,H,Tq,S)

    long tiles() const { return (Tk + BK - 1) / BK; }
};

static bool finite(const float *x, long n) {
    for (long i = 0; i < n; i++)
        if (!std::isfinite(x[i])) return false;
    return true;
}

static float norm(const float *x, long n) {
    vf sum = {};
    long i = 0;
    for (; i + W <= n; i += W) sum += load(x + i) * load(x + i);
    float rest = hsum(sum);
    for (; i < n; i++) rest += x[i] * x[i];
    return std::sqrt(rest);
}

// Coordinate and rate of one term for up to 64 tokens. c as two floats: their differences lose nothing of c_j - c_t.
struct Side {
    alignas(64) float high[BQ], low[BQ], rate[BQ];

    void read(const double *c, const int64_t *cs, const float *rates, const int64_t *rs, long r, long b, long h,
              long first, long count) {
        const double *at = c + r * cs[0] + b * cs[1] + h * cs[2] + first * cs[3];
        const float *speed = rates ? rates + r * rs[0] + b * rs[1] + h * rs[2] + first * rs[3] : nullptr;
        for (long i = 0; i < BQ; i++) {
            double x = i < count ? at[i * cs[3]] : 0;
            high[i] = (float)x;
            low[i] = std::isfinite(high[i]) ? (float)(x - high[i]) : 0;  // infinity minus infinity would be NaN
            rate[i] = speed && i < count ? speed[i * rs[3]] : 0;
        }
    }
};

static inline vf offset(const Side &key, long j, vf high, vf low) {
    return (all(key.high[j]) - high) + (all(key.low[j]) - low);
}

// One head's block of queries, and everything a tile of it needs.
struct Block {
    const Problem &p;
    long b, h, kv, bh, t0, nt, token, tiles;  // nt queries, the first at key index `token`; tiles: of keys, in all
    int nv, lanes;                            // vectors and lanes that hold those queries
    const float *k, *v, *probe_k;             // of this head
    const float *k_tile, *v_tile;             // of the current tile: without rows that are not finite
    bool bad_rows;
    float path_rate = 0;
    std::vector<float> qT, probeT, s, z, k_clean, v_clean;
    std::vector<float> mixT, band;            // (S,BQ); (S + 1,BAND) table at the tile's distances, then 0 or -inf
    std::vector<float> least, most;           // (S) of the band
    float outside;
    bool rows_run, even;                      // positions of the queries, and also of the tile's keys, rise by 1
    std::vector<Side> rows, keys;
    alignas(64) float m[BQ], l[BQ], q_norm[BQ], poison[BQ];  // of a row: maximum, sum of exp, scaled |q|, NaN or 0
    alignas(64) float sum_high[BQ], sum_low[BQ];             // path: sum of psi(t, l) over the l to the right

    explicit Block(const Problem &p)
        : p(p), tiles(p.tiles()), qT(p.D * BQ), probeT(p.P * BQ), s(TILE), z(p.P ? TILE : 0),
          mixT(p.S * BQ), band(p.S ? (p.S + 1) * BAND : 0), least(p.S), most(p.S), rows(p.R), keys(p.R) {}

    void select(long head, long block) {
        bh = head; b = head / p.H; h = head % p.H; kv = b * p.KV + h / (p.H / p.KV);
        t0 = block * BQ; nt = std::min<long>(BQ, p.Tq - t0); token = t0 + p.Tk - p.Tq;
        nv = (nt + W - 1) / W; lanes = nv * W;
        k = p.k + kv * p.Tk * p.D;
        v = p.v + kv * p.Tk * p.Dv;
        const float *q = p.q + (bh * p.Tq + t0) * p.D;
        bad_rows = false;
        for (long t = 0; t < BQ; t++) {
            q_norm[t] = t < nt ? norm(q + t * p.D, p.D) * std::fabs(p.scale) : 0;
            bool bad = !std::isfinite(q_norm[t]) && !finite(q + t * p.D, p.D);
            poison[t] = bad ? NOT : 0;
            bad_rows |= bad;
        }
        transpose(q, p.D, p.scale, qT.data());
        for (long r = 0; r < p.R; r++) rows[r].read(p.c_q, p.cq_stride, p.rate_q, p.rq_stride, r, b, h, t0, nt);
        if (p.S) select_places();
        if (!p.P) return;
        long probe = b * p.HP + h / (p.H / p.HP);
        path_rate = p.path_rate[h];
        probe_k = p.probe_k + probe * p.Tk * p.P;
        transpose(p.probe_q + (probe * p.Tq + t0) * p.P, p.P, 1.0f / p.P, probeT.data());
        std::fill(sum_high, sum_high + BQ, 0.0f);
        std::fill(sum_low, sum_low + BQ, 0.0f);
    }

    void select_places() {
        const int64_t *at = p.place_q + b * p.Tq + t0;
        rows_run = true;
        for (long t = 1; t < nt; t++) rows_run &= at[t] == at[0] + t;
        if (p.mix) transpose(p.mix + (bh * p.Tq + t0) * p.S, p.S, 1, mixT.data());
    }

    // rows (nt x width) -> lanes (width x BQ), zero beyond nt
    void transpose(const float *from, long width, float factor, float *to) const {
        for (long d = 0; d < width; d++) {
            for (long t = 0; t < nt; t++) to[d * BQ + t] = from[t * width + d] * factor;
            for (long t = nt; t < BQ; t++) to[d * BQ + t] = 0;
        }
    }

    long first_tile() const { return p.window && !p.sinks ? std::max<long>(0, token - p.window + 1) / BK : 0; }
    long end_tile() const {
        long last = p.Tk - 1;
        if (p.causal) last = std::min(last, token + nt - 1);
        else if (p.window) last = std::min(last, std::max(token + nt - 1 + p.window - 1, p.sinks - 1));
        return last < 0 ? 0 : last / BK + 1;
    }

    enum Sight { NONE, PART, WHOLE };

    // What the masks leave of a tile.
    Sight sight(long j0, long nj) const {
        bool whole = nt == lanes;
        long last = j0 + nj - 1, end = token + nt - 1;
        if (p.causal) whole = whole && last <= token;
        if (p.window && last >= p.sinks) {
            if ((token - last >= p.window || j0 - end >= p.window) && j0 >= p.sinks) return NONE;
            whole = whole && end - j0 < p.window && last - token < p.window;
        }
        if (p.documents) {
            const int64_t *doc = p.documents + b * p.Tk;
            auto mine = std::minmax_element(doc + token, doc + token + nt);
            auto theirs = std::minmax_element(doc + j0, doc + j0 + nj);
            if (*mine.first > *theirs.second || *theirs.first > *mine.second) return NONE;
            whole = whole && *mine.first == *mine.second && *theirs.first == *theirs.second;
        }
        if (p.key_padding) {
            const uint8_t *pad = p.key_padding + b * p.Tk + j0;
            long hidden = nj - std::count(pad, pad + nj, 0);
            if (hidden == nj) return NONE;
            whole = whole && hidden == 0;
        }
        return whole ? WHOLE : PART;
    }

    double key_norm(long kb) const { return p.key_norm[kv * tiles + kb]; }

    // The largest a term can be for these rows in the tile: a product over a rectangle is largest at a corner,
    // whatever the signs. A NaN or an infinity makes it NaN, which never prunes.
    vf slope_bound(long r, long kb, int n) const {
        const double *range = p.slope_range + ((r * p.B * p.H + bh) * tiles + kb) * 4;
        vf high = load(rows[r].high + n * W), low = load(rows[r].low + n * W), rate = load(rows[r].rate + n * W);
        vf least = rate + all((float)range[2]), most = rate + all((float)range[3]), end[2];
        for (int i = 0; i < 2; i++) {
            float edge = (float)range[i];
            end[i] = (all(edge) - high) + (all((float)(range[i] - edge)) - low);
        }
        vf bound = vmax(vmax(least * end[0], least * end[1]), vmax(most * end[0], most * end[1]));
        return bound + (least + most + end[0] + end[1]) * vf{};
    }

    // Entry of a table at a distance; -1 outside it, unless its ends go on.
    long entry(int64_t apart) const {
        int64_t i = apart - p.first;
        if (i >= 0 && i < p.L) return i;
        return p.beyond ? -1 : i < 0 ? 0 : p.L - 1;
    }

    int64_t apart(long t, long j) const { return p.place_q[b * p.Tq + t0 + t] - p.place_k[b * p.Tk + j]; }

    // band[s][t - j + BK - 1] = table s at the distance of row t and key j0 + j. Only if all positions run on.
    void read_band(long j0, long nj) {
        const int64_t *at = p.place_k + b * p.Tk + j0;
        even = rows_run;
        for (long j = 1; j < nj; j++) even &= at[j] == at[0] + j;
        for (long i = 0; i < BAND && even; i++) {
            long e = entry(apart(0, j0) + i - (BK - 1));
            for (long r = 0; r < p.S; r++) band[r * BAND + i] = e < 0 ? 0 : p.table[(h * p.S + r) * p.L + e];
            band[p.S * BAND + i] = e < 0 && p.beyond == 2 ? -INF : 0;
        }
    }

    void add_distances(long j0, long nj) {
        read_band(j0, nj);
        if (!even) return add_distances_one_by_one(j0, nj);
        for (int n = 0; n < nv; n++)
            for (long j = 0; j < nj; j++) {
                const float *at = band.data() + n * W - j + BK - 1;
                vf sum = load(at + p.S * BAND);
                for (long r = 0; r < p.S; r++)
                    sum += p.mix ? load(&mixT[r * BQ + n * W]) * load(at + r * BAND) : load(at + r * BAND);
                store(s.data() + j * BQ + n * W, load(s.data() + j * BQ + n * W) + sum);
            }
    }

    void add_distances_one_by_one(long j0, long nj) {
        for (long j = 0; j < nj; j++)
            for (long t = 0; t < nt; t++) {
                long e = entry(apart(t, j0 + j));
                float sum = e < 0 && p.beyond == 2 ? -INF : 0;
                for (long r = 0; r < p.S && e >= 0; r++)
                    sum += p.table[(h * p.S + r) * p.L + e] * (p.mix ? mixT[r * BQ + t] : 1);
                s[j * BQ + t] += sum;
            }
    }

    // The extremes of each table in the tile, and 0 or -inf (all distances outside); false where nothing is known.
    bool distance_range(long j0, long nj) {
        read_band(j0, nj);
        outside = -INF;
        for (long r = 0; r <= p.S && even; r++) {
            const float *at = &band[r * BAND];
            auto ends = std::minmax_element(at + BK - nj, at + BK - 1 + nt);
            if (r == p.S) outside = *ends.second;
            else { least[r] = *ends.first; most[r] = *ends.second; }
            if (r < p.S && !finite(at + BK - nj, nj + nt - 1)) return false;
        }
        return even;
    }

    // The largest the tables can add for these rows in the tile.
    vf distance_bound(int n) const {
        vf bound = all(outside);
        for (long r = 0; r < p.S; r++) {
            vf mix = p.mix ? load(&mixT[r * BQ + n * W]) : all(1.0f);
            bound += vmax(mix * all(least[r]), mix * all(most[r])) + mix * vf{};
        }
        return bound;
    }

    // True when no weight of the tile can survive rounding. `found` is for each row a lower bound of its largest logit:
    // its running maximum or, in the backward pass, its logsumexp.
    bool negligible(long kb, const float *found, float k_norm) {
        if (p.tau < 0 || (p.P && !(path_rate >= 0))) return false;
        if (p.S && !distance_range(kb * BK, std::min<long>(BK, p.Tk - kb * BK))) return false;
        for (int n = 0; n < nv; n++) {
            vf bound = load(q_norm + n * W) * all(k_norm);
            for (long r = 0; r < p.R; r++) bound += slope_bound(r, kb, n);
            if (p.P) bound += all(path_rate) * load(sum_high + n * W);
            if (p.S) bound += distance_bound(n);
            bound += vmin(vabs(bound), all(HUGEST)) * all(1e-5f) + all(1e-3f);  // the bound's own rounding
            vi keep = ~(bound < load(found + n * W) - all(p.tau));
            if (any(keep & (iota() + alli(n * W) < alli((int)nt)))) return false;
        }
        return true;
    }

    bool path_alone() const { return p.P && !p.R && !p.S; }

    // A path alone only falls leftwards: once negligible against the longest key, all the rest is.
    float longest_key(long first, long end) const {
        double longest = 0;
        for (long kb = first; kb < end && path_alone() && p.tau >= 0; kb++)
            if (!(key_norm(kb) <= longest)) longest = key_norm(kb);
        return (float)longest;
    }

    // psi(t, l) of the tile from probes; path[j] = its sum over l = j+1 … t; with `slope` also g'. The sums move on.
    template <bool SLOPE>
    void scan_path(long j0, long nj, float *path, float *slope) {
        gemm(nj, lanes, p.P, probe_k + j0 * p.P, p.P, 1, probeT.data(), BQ, z.data(), BQ, false);
        for (int n = 0; n < nv; n++) {
            vf high = load(sum_high + n * W), low = load(sum_low + n * W), chunk = {};
            vi t = iota() + alli((int)token + n * W);
            for (long j = nj - 1; j >= 0; j--) {
                long i = j * BQ + n * W;
                store(path + i, high + (low + chunk));
                Link g = link(load(z.data() + i), p.bounded, SLOPE);
                if (j0 + j > token) {
                    vi past = t >= alli((int)(j0 + j));
                    g = {past ? g.value : vf{}, past ? g.slope : vf{}};
                }
                if (SLOPE) store(slope + i, g.slope);
                chunk += g.value;
                if (j % 8 == 0) { add_exactly(high, low, chunk); chunk = vf{}; }
            }
            store(sum_high + n * W, high);
            store(sum_low + n * W, low);
        }
    }

    void add_slope(long r, long nj) {
        const Side &row = rows[r], &key = keys[r];
        for (int n = 0; n < nv; n++) {
            vf high = load(row.high + n * W), low = load(row.low + n * W), rate = load(row.rate + n * W);
            for (long j = 0; j < nj; j++) {
                vf both = p.rate_k ? rate + all(key.rate[j]) : rate;
                float *at = s.data() + j * BQ + n * W;
                store(at, load(at) + both * offset(key, j, high, low));
            }
        }
    }

    void hide(long j0, long nj) {
        alignas(64) int32_t same[BQ];
        const int64_t *doc = p.documents ? p.documents + b * p.Tk : nullptr;
        for (long j = 0; j < nj; j++) {
            long key = j0 + j;
            bool padded = p.key_padding && p.key_padding[b * p.Tk + key], anywhere = !p.window || key < p.sinks;
            vi at = alli((int)key), reach = alli((int)p.window);
            for (long i = 0; doc && i < nt; i++) same[i] = -(doc[token + i] == doc[key]);
            for (int n = 0; n < nv; n++) {
                vi t = iota() + alli((int)token + n * W), seen = t < alli((int)(token + nt));
                if (p.causal) seen &= t >= at;
                if (!anywhere) seen &= (t - at < reach) & (at - t < reach);
                if (doc) seen &= loadi(same + n * W);
                if (padded) seen = vi{};
                float *to = s.data() + j * BQ + n * W;
                store(to, seen ? load(to) : all(-INF));
            }
        }
    }

    // Points k_tile and v_tile at the tile, or at copies with zeros for the keys that are not finite: those get the
    // logit NaN, and where the masks hide them nothing of them is left.
    bool clean(long kb, long j0, long nj, float *key_poison) {
        k_tile = k + j0 * p.D; v_tile = v + j0 * p.Dv;
        if (std::isfinite(key_norm(kb))) return false;
        k_clean.assign(k_tile, k_tile + nj * p.D);
        v_clean.assign(v_tile, v_tile + nj * p.Dv);
        for (long j = 0; j < nj; j++) {
            bool bad = !finite(k_tile + j * p.D, p.D) || !finite(v_tile + j * p.Dv, p.Dv);
            key_poison[j] = bad ? NOT : 0;
            if (bad) std::fill_n(&k_clean[j * p.D], p.D, 0.0f), std::fill_n(&v_clean[j * p.Dv], p.Dv, 0.0f);
        }
        k_tile = k_clean.data(); v_tile = v_clean.data();
        return true;
    }

    // s = the tile's logits; `path` are the sums scan_path left, or null.
    void logits(long kb, long j0, long nj, bool whole, const float *path) {
        float key_poison[BK];
        bool bad_keys = clean(kb, j0, nj, key_poison);
        gemm(nj, lanes, p.D, k_tile, p.D, 1, qT.data(), BQ, s.data(), BQ, false);
        for (long r = 0; r < p.R; r++) {
            keys[r].read(p.c_k, p.ck_stride, p.rate_k, p.rk_stride, r, b, h, j0, nj);
            add_slope(r, nj);
        }
        if (p.S) add_distances(j0, nj);
        for (long i = 0; path && i < nj * BQ; i += W)
            store(s.data() + i, load(s.data() + i) + all(path_rate) * load(path + i));
        for (long j = 0; j < nj && (bad_keys || bad_rows); j++)
            for (int i = 0; i < lanes; i++) s[j * BQ + i] += poison[i] + (bad_keys ? key_poison[j] : 0);
        if (!whole) hide(j0, nj);
    }
};

// ---------------------------------------------------------------------------------------- forward

struct Forward : Block {
    std::vector<float> oT, path;
    explicit Forward(const Problem &p) : Block(p), oT(p.Dv * BQ), path(p.P ? TILE : 0) {}

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
        for (long t = 0; t < nt; t++) {
            long row = bh * p.Tq + t0 + t;
            bool no_key = m[t] == -INF && l[t] == 0;  // zeros, and weights of 0 in the backward pass
            p.norms[row * 2] = no_key ? INF : m[t];
            p.norms[row * 2 + 1] = no_key ? 1 : l[t];
            p.lse[row] = no_key ? -INF : m[t] + std::log(l[t]);
            float inverse = no_key ? 0 : 1 / l[t];
            for (long d = 0; d < p.Dv; d++) p.out[row * p.Dv + d] = oT[d * BQ + t] * inverse;
        }
    }

    void run(long head, long block) {
        select(head, block);
        std::fill(m, m + BQ, -INF);
        std::fill(l, l + BQ, 0.0f);
        std::fill(oT.begin(), oT.end(), 0.0f);
        long computed = 0, visible = 0, first = first_tile(), end = end_tile();
        bool stopped = false;
        float longest = longest_key(first, end);
        for (long kb = end - 1; kb >= first; kb--) {
            long j0 = kb * BK, nj = std::min<long>(BK, p.Tk - j0);
            Sight seen = sight(j0, nj);
            visible += seen != NONE;
            if (path_alone() && !stopped) stopped = negligible(kb, m, longest);
            if (stopped) continue;
            bool skip = seen == NONE || negligible(kb, m, key_norm(kb));
            if (p.P) scan_path<false>(j0, nj, path.data(), nullptr);
            if (skip) continue;
            computed++;
            logits(kb, j0, nj, seen == WHOLE, p.P ? path.data() : nullptr);
            soften(nj);
            gemm(p.Dv, lanes, nj, v_tile, 1, p.Dv, s.data(), BQ, oT.data(), BQ, true);
        }
        finish();
#pragma omp atomic
        p.work[bh * 2] += computed;
#pragma omp atomic
        p.work[bh * 2 + 1] += visible;
    }
};

// --------------------------------------------------------------------------------------- backward

static void add_lanes(double *to, int n, vf x) {
    for (int i = 0; i < W; i++) to[n * W + i] += x[i];
}

struct Backward : Block {
    std::vector<float> dOT, dp, dz, q_scaled, dq, dpqT, paths, slopes;  // paths, slopes: of all tiles, for one block
    alignas(64) float before_high[BQ], before_low[BQ];                 // path: sum of dS(t, j) over the j to the left
    alignas(64) float lse[BQ], delta[BQ];
    std::vector<double> rate_sum, rate_mean, c_sum;  // (R, BQ)
    std::vector<double> mix_sum;                     // (S, BQ)
    std::vector<float> skew;
    std::vector<uint8_t> todo;
    double drift[BQ], path_sum[BQ], path_mean[BQ], d_rate = 0;
    long split = 0;

    explicit Backward(const Problem &p)
        : Block(p), dOT(p.Dv * BQ), dp(TILE), dz(p.P ? TILE : 0), q_scaled(BQ * p.D), dq(BQ * p.D), dpqT(p.P * BQ),
          paths(p.P ? tiles * TILE : 0), slopes(paths.size()), rate_sum(p.R * BQ), rate_mean(p.R * BQ),
          c_sum(p.R * BQ), mix_sum(p.S * BQ), skew(p.S ? W * BAND : 0), todo(tiles) {}

    // Which tiles to compute and, with a path, its sums and slopes in every tile, from the right.
    void plan(long first, long end) {
        bool stopped = false;
        float longest = longest_key(first, end);
        for (long kb = end - 1; kb >= first; kb--) {
            long j0 = kb * BK, nj = std::min<long>(BK, p.Tk - j0);
            todo[kb] = NONE;
            if (path_alone() && !stopped) stopped = negligible(kb, lse, longest);
            if (stopped) continue;
            Sight seen = sight(j0, nj);
            todo[kb] = seen == NONE || negligible(kb, lse, key_norm(kb)) ? NONE : seen;
            if (p.P) scan_path<true>(j0, nj, &paths[kb * TILE], &slopes[kb * TILE]);
        }
    }

    // s, dp: the tile's logits and dP
    void recompute(long kb, long j0, long nj) {
        logits(kb, j0, nj, todo[kb] == WHOLE, p.P ? &paths[kb * TILE] : nullptr);
        gemm(nj, lanes, p.Dv, v_tile, p.Dv, 1, dOT.data(), BQ, dp.data(), BQ, false);
    }

    // Where one key has nearly all the weight, dS is a difference of two numbers that agree in nearly every digit.
    // Then delta is formed from the dP it is taken from, so that their rounding cancels as in a dense softmax: a
    // second pass over the tiles, if an eighth of the rows are such.
    void renew_delta(long first, long end) {
        long concentrated = 0;
        for (long t = 0; t < nt; t++) concentrated += l[t] < 1.25f && m[t] < INF;
        if (8 * concentrated < nt || concentrated == 0) return;
        double sum[BQ] = {};
        for (long kb = first; kb < end; kb++) {
            if (!todo[kb]) continue;
            long j0 = kb * BK, nj = std::min<long>(BK, p.Tk - j0);
            recompute(kb, j0, nj);
            for (int n = 0; n < nv; n++) {
                vf top = load(m + n * W), inverse = all(1.0f) / load(l + n * W), mean = {};
                for (long i = n * W; i < nj * BQ; i += BQ)
                    mean += vexp(load(s.data() + i) - top) * inverse * load(dp.data() + i);
                add_lanes(sum, n, mean);
            }
        }
        long row = bh * p.Tq + t0;
        for (long t = 0; t < nt; t++) delta[t] = sum[t] - (p.d_lse && m[t] != INF ? p.d_lse[row + t] : 0);
    }

    void weights_and_slopes(long nj) {  // s -> P, dp -> dS = P (dP - delta)
        for (int n = 0; n < nv; n++) {
            vf top = load(m + n * W), inverse = all(1.0f) / load(l + n * W), mean = load(delta + n * W), total = {};
            for (long j = 0; j < nj; j++) {
                long i = j * BQ + n * W;
                vf w = vexp(load(s.data() + i) - top) * inverse, ds = w * (load(dp.data() + i) - mean);
                store(s.data() + i, w);
                store(dp.data() + i, ds);
                total += ds;
            }
            add_lanes(drift, n, total);
        }
    }

    double *of_keys(double *grad, long r, long j0) const {
        return grad + ((split * p.R + r) * p.B * p.H + bh) * p.Tk + j0;
    }

    void rate_gradient(long r, long j0, long nj) {
        const Side &row = rows[r], &side = keys[r];
        vf key[BK];
        for (long j = 0; j < nj; j++) key[j] = vf{};
        for (int n = 0; n < nv; n++) {
            vf high = load(row.high + n * W), low = load(row.low + n * W), sum = {}, mean = {};
            for (long j = 0; j < nj; j++) {
                vf off = offset(side, j, high, low), moved = load(dp.data() + j * BQ + n * W) * off;
                sum += moved;
                mean += load(s.data() + j * BQ + n * W) * off;
                key[j] += moved;
            }
            add_lanes(&rate_sum[r * BQ], n, sum);
            add_lanes(&rate_mean[r * BQ], n, mean);
        }
        for (long j = 0; j < nj && p.d_rate_k; j++) of_keys(p.d_rate_k, r, j0)[j] += hsum(key[j]);
    }

    // What a pair adds at its key it takes away at its query. A cumulative sum usually stands behind c and would add
    // up any difference between the two, so both are summed in double from the same rounded product.
    void c_gradient(long r, long j0, long nj) {
        vd key[BK];
        for (long j = 0; j < nj; j++) key[j] = vd{};
        for (int n = 0; n < nv; n++) {
            vf own = load(rows[r].rate + n * W);
            vd sum = {};
            for (long j = 0; j < nj; j++) {
                vf rate = p.rate_k ? own + all(keys[r].rate[j]) : own;
                vd pair = __builtin_convertvector(load(dp.data() + j * BQ + n * W) * rate, vd);
                sum += pair;
                key[j] += pair;
            }
            for (int i = 0; i < W; i++) c_sum[r * BQ + n * W + i] += sum[i];
        }
        for (long j = 0; j < nj; j++)
            for (int i = 0; i < W; i++) of_keys(p.d_c_k, r, j0)[j] += key[j][i];
    }

    double *of_table(long r) const { return p.d_table + ((split * p.B * p.H + bh) * p.S + r) * p.L; }

    // Sums of mix * dS along the diagonals of the tile. Those of the keys j, j + W, … lie in one row of `skew`, so that
    // every sum stays in its lane; the rows are then added, each shifted by its j.
    void table_gradient(long r, long j0, long nj) {
        std::fill(skew.begin(), skew.end(), 0.0f);
        for (long j = 0; j < nj; j++)
            for (int n = 0; n < nv; n++) {
                float *at = &skew[j % W * BAND + n * W - j / W * W + BK];
                vf ds = load(dp.data() + j * BQ + n * W);
                store(at, load(at) + (p.mix ? ds * load(&mixT[r * BQ + n * W]) : ds));
            }
        for (long i = 0; i < BAND - 1; i++) {  // t - j = i - (BK - 1)
            double sum = 0;
            for (long j = 0; j < W; j++) sum += i + 1 + j < BAND ? skew[j * BAND + i + 1 + j] : 0;
            long e = entry(apart(0, j0) + i - (BK - 1));
            if (e >= 0) of_table(r)[e] += sum;
        }
    }

    void mix_gradient(long r, long nj) {
        for (int n = 0; n < nv; n++) {
            vf sum = {};
            for (long j = 0; j < nj; j++)
                sum += load(dp.data() + j * BQ + n * W) * load(&band[r * BAND + n * W - j + BK - 1]);
            add_lanes(&mix_sum[r * BQ], n, sum);
        }
    }

    void distance_gradient(long j0, long nj) {
        for (long r = 0; r < p.S && even; r++) {
            table_gradient(r, j0, nj);
            if (p.mix) mix_gradient(r, nj);
        }
        for (long j = 0; j < nj && !even; j++)
            for (long t = 0; t < nt; t++) {
                long e = entry(apart(t, j0 + j));
                for (long r = 0; r < p.S && e >= 0; r++) {
                    float ds = dp[j * BQ + t];
                    of_table(r)[e] += ds * (p.mix ? mixT[r * BQ + t] : 1);
                    mix_sum[r * BQ + t] += ds * p.table[(h * p.S + r) * p.L + e];
                }
            }
    }

    // d psi(t, l) = rate * sum of dS(t, j) over j < l, from the left; then through the link to the probes.
    void path_gradient(long kb, long j0, long nj) {
        const float *path = &paths[kb * TILE], *slope = &slopes[kb * TILE];
        vf rate = all(path_rate / p.P);
        for (int n = 0; n < nv; n++) {
            vf of_rate = {}, mean_rate = {};
            vf high = load(before_high + n * W), low = load(before_low + n * W), chunk = {};
            for (long j = 0; j < nj; j++) {
                long i = j * BQ + n * W;
                store(dz.data() + i, rate * (high + (low + chunk)) * load(slope + i));
                if (!todo[kb]) continue;
                vf ds = load(dp.data() + i);
                of_rate += ds * load(path + i);
                mean_rate += load(s.data() + i) * load(path + i);
                chunk += ds;
                if (j % 8 == 7) { add_exactly(high, low, chunk); chunk = vf{}; }
            }
            add_exactly(high, low, chunk);
            store(before_high + n * W, high);
            store(before_low + n * W, low);
            add_lanes(path_sum, n, of_rate);
            add_lanes(path_mean, n, mean_rate);
        }
        long probe = b * p.HP + h / (p.H / p.HP);
        float *d_key = p.d_probe_k + ((split * p.B * p.H + bh) * p.Tk + j0) * p.P;
        gemm(nj, p.P, nt, dz.data(), BQ, 1, p.probe_q + (probe * p.Tq + t0) * p.P, p.P, d_key, p.P, true);
        gemm(p.P, lanes, nj, probe_k + j0 * p.P, 1, p.P, dz.data(), BQ, dpqT.data(), BQ, true);
    }

    bool anything_before() const {
        for (int t = 0; t < BQ; t++)
            if (before_high[t] != 0 || before_low[t] != 0) return true;
        return false;
    }

    void tile(long kb) {
        long j0 = kb * BK, nj = std::min<long>(BK, p.Tk - j0), to = (split * p.B * p.KV + kv) * p.Tk + j0;
        if (todo[kb]) {
            recompute(kb, j0, nj);
            weights_and_slopes(nj);
            const float *d_out = p.d_out + (bh * p.Tq + t0) * p.Dv;
            gemm(nj, p.Dv, nt, s.data(), BQ, 1, d_out, p.Dv, p.d_v + to * p.Dv, p.Dv, true);
            gemm(nj, p.D, nt, dp.data(), BQ, 1, q_scaled.data(), p.D, p.d_k + to * p.D, p.D, true);
            gemm(nt, p.D, nj, dp.data(), 1, BQ, k_tile, p.D, dq.data(), p.D, true);
            for (long r = 0; r < p.R; r++) {
                if (p.d_rate_q || p.d_rate_k) rate_gradient(r, j0, nj);
                if (p.d_c_k) c_gradient(r, j0, nj);
            }
            if (p.d_table) distance_gradient(j0, nj);
        }
        if (p.d_probe_k && j0 <= token + nt - 1 && (todo[kb] || anything_before())) path_gradient(kb, j0, nj);
    }

    void start() {
        long row = bh * p.Tq + t0;
        for (long t = 0; t < BQ; t++) {
            double sum = 0;
            for (long d = 0; t < nt && d < p.Dv; d++)
                sum += (double)p.d_out[(row + t) * p.Dv + d] * p.out[(row + t) * p.Dv + d];
            m[t] = t < nt ? p.norms[(row + t) * 2] : INF;
            l[t] = t < nt ? p.norms[(row + t) * 2 + 1] : 1;
            lse[t] = m[t] + std::log(l[t]);
            if (t < nt && p.d_lse && m[t] != INF) sum -= p.d_lse[row + t];
            delta[t] = sum;  // the mean of dP under the weights
            before_high[t] = before_low[t] = 0;
            drift[t] = path_sum[t] = path_mean[t] = 0;
        }
        for (auto *sums : {&rate_sum, &rate_mean, &c_sum, &mix_sum}) std::fill(sums->begin(), sums->end(), 0.0);
        for (auto *sums : {&dq, &dpqT}) std::fill(sums->begin(), sums->end(), 0.0f);
        transpose(p.d_out + row * p.Dv, p.Dv, 1, dOT.data());
        for (long t = 0; t < nt; t++)  // a row that is not finite has weights NaN or 0, and 0 x NaN would spread
            for (long d = 0; d < p.D; d++)
                q_scaled[t * p.D + d] = poison[t] == 0 ? p.q[(row + t) * p.D + d] * p.scale : 0;
    }

    // A row's dS adds up to zero, plus d_lse; what rounding leaves (drift) would be magnified by the row's mean
    // offset, so it is taken back with the row's weights: as if delta had been formed from the dP summed here.
    void finish() {
        long row = bh * p.Tq + t0;
        for (long t = 0; t < nt; t++) {
            double extra = drift[t] - (p.d_lse && m[t] != INF ? p.d_lse[row + t] : 0);
            for (long r = 0; r < p.R; r++) {
                long at = r * p.B * p.H * p.Tq + row + t, i = r * BQ + t;
                if (p.d_rate_q) p.d_rate_q[at] = rate_sum[i] - extra * rate_mean[i];
                if (p.d_c_q) p.d_c_q[at] = -c_sum[i];
            }
            for (long r = 0; p.d_mix && r < p.S; r++) p.d_mix[(row + t) * p.S + r] = mix_sum[r * BQ + t];
            d_rate += path_sum[t] - extra * path_mean[t];
        }
        for (long i = 0; i < nt * p.D; i++) p.d_q[row * p.D + i] = dq[i] * p.scale;
        for (long i = 0; p.d_probe_q && i < nt * p.P; i++) p.d_probe_q[row * p.P + i] = dpqT[i % p.P * BQ + i / p.P];
    }

    void run(long head, long block) {
        select(head, block);
        start();
        long first = first_tile(), end = end_tile();
        plan(first, end);
        renew_delta(first, end);
        for (long kb = first; kb < end; kb++) tile(kb);
        finish();
    }
};

// For each tile of keys: the largest |k|, NaN where k or v is not finite; and the extremes of c and of the key's rate.
static void measure_keys(const Problem &p) {
    long tiles = p.tiles(), slopes = p.tau < 0 ? 0 : p.R * p.B * p.H;
#pragma omp parallel for num_threads(p.threads) schedule(static)
    for (long job = 0; job < (p.B * p.KV + slopes) * tiles; job++) {
        long row = job / tiles, j0 = job % tiles * BK, nj = std::min<long>(BK, p.Tk - j0);
        if (row < p.B * p.KV) {
            float longest = 0;
            for (long j = row * p.Tk + j0; j < row * p.Tk + j0 + nj; j++) {
                float x = norm(p.k + j * p.D, p.D), y = norm(p.v + j * p.Dv, p.Dv);
                if (!(x <= longest) || !std::isfinite(y)) longest = std::isfinite(y) ? x : NOT;
                if (!std::isfinite(longest)) break;
            }
            p.key_norm[job] = std::isfinite(longest) ? longest : NOT;
            continue;
        }
        row -= p.B * p.KV;
        long r = row / (p.B * p.H), b = row / p.H % p.B, h = row % p.H;
        double *range = p.slope_range + (row * tiles + j0 / BK) * 4;
        const int64_t *cs = p.ck_stride, *rs = p.rk_stride;
        range[0] = range[2] = INF;
        range[1] = range[3] = -INF;
        for (long j = j0; j < j0 + nj; j++) {
            double each[2] = {p.c_k[r * cs[0] + b * cs[1] + h * cs[2] + j * cs[3]],
                              p.rate_k ? p.rate_k[r * rs[0] + b * rs[1] + h * rs[2] + j * rs[3]] : 0.0};
            for (int i = 0; i < 2; i++) {
                if (!(each[i] >= range[2 * i])) range[2 * i] = each[i];
                if (!(each[i] <= range[2 * i + 1])) range[2 * i + 1] = each[i];
                if (each[i] != each[i]) j = p.Tk;  // NaN: both extremes are, and stay
            }
        }
    }
}

extern "C" void grape_forward(const Problem *problem) {
    const Problem &p = *problem;
    long blocks = (p.Tq + BQ - 1) / BQ, jobs = p.B * p.H * blocks;
    measure_keys(p);
#pragma omp parallel num_threads(p.threads)
    {
        Forward forward(p);
#pragma omp for schedule(dynamic, 1)
        for (long job = 0; job < jobs; job++)  // a head's keys stay in cache; its longest rows first
            forward.run(job / blocks, blocks - 1 - job % blocks);
    }
}

// A job is a key head with all its query heads, or a share of their blocks; the most work first.
extern "C" void grape_backward(const Problem *problem) {
    const Problem &p = *problem;
    long blocks = (p.Tq + BQ - 1) / BQ, group = p.H / p.KV, jobs = p.B * p.KV * p.splits;
    std::vector<long> work(p.B * p.KV), order(p.B * p.KV);
    for (long bh = 0; bh < p.B * p.H; bh++) work[bh / group] += p.work[bh * 2];
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](long x, long y) { return work[x] > work[y]; });
#pragma omp parallel num_threads(p.threads)
    {
        Backward backward(p);
#pragma omp for schedule(dynamic, 1)
        for (long job = 0; job < jobs; job++) {
            long first = order[job / p.splits] * group;
            backward.split = job % p.splits;
            for (long head = first; head < first + group; head++) {
                backward.d_rate = 0;
                for (long block = backward.split; block < blocks; block += p.splits) backward.run(head, block);
                if (p.d_path_rate) p.d_path_rate[backward.split * p.B * p.H + head] = backward.d_rate;
            }
        }
    }
}
