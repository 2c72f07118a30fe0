// The CPU attention kernel against a plain double-precision loop: forward and every gradient, many masks.
// Built and run by tests/test_attention_portable.py for processors other than this one.
#include "tiles.cpp"
#include "decode.cpp"

#include <cstdio>
#include <random>

using Vec = std::vector<double>;

struct Case {
    long B, H, KV, HP, Tq, Tk, D, Dv, R, P, causal, window, sinks, bounded, docs, pads;
    float tau;
};

static std::mt19937 dice(0);
static double uniform(double a, double b) { return a + (b - a) * (dice() / 4294967296.0); }

template <class T> static std::vector<T> random(long n, double a = -1, double b = 1) {
    std::vector<T> x(n);
    for (auto &y : x) y = (T)uniform(a, b);
    return x;
}

struct Data {
    Case c;
    std::vector<float> q, k, v, rq, rk, pq, pk, pr, d_out, d_lse;
    std::vector<double> cq, ck;
    std::vector<int64_t> doc;
    std::vector<uint8_t> pad;
};

static double g(double z, bool bounded) { return bounded ? 1 / (1 + std::exp(-z)) - 1 : -std::log1p(std::exp(-z)); }

// The loss sum(out * d_out) + sum(lse * d_lse) in double, and optionally out.
static double loss(const Data &x, Vec *out = nullptr) {
    const Case &c = x.c;
    double total = 0;
    for (long b = 0; b < c.B; b++) for (long h = 0; h < c.H; h++) for (long t = 0; t < c.Tq; t++) {
        long kv = b * c.KV + h / (c.H / c.KV), row = (b * c.H + h) * c.Tq + t, token = t + c.Tk - c.Tq;
        Vec logit(c.Tk, -INFINITY);
        double path = 0, top = -INFINITY;
        for (long j = c.Tk - 1; j >= 0; j--) {
            double s = 0;
            for (long d = 0; d < c.D; d++) s += (double)x.q[row * c.D + d] * x.k[(kv * c.Tk + j) * c.D + d];
            s *= 0.5f;
            for (long r = 0; r < c.R; r++) {
                long head = r * c.B * c.H + b * c.H + h;
                s += ((double)x.rq[head * c.Tq + t] + x.rk[head * c.Tk + j]) * (x.ck[head * c.Tk + j] - x.cq[head * c.Tq + t]);
            }
            if (c.P) {
                long hp = b * c.HP + h / (c.H / c.HP);
                s += x.pr[h] * path;  // the sum over l = j+1 … t
                double z = 0;
                for (long e = 0; e < c.P; e++) z += (double)x.pq[(hp * c.Tq + t) * c.P + e] * x.pk[(hp * c.Tk + j) * c.P + e];
                if (j <= token) path += g(z / c.P, c.bounded);
            }
            bool seen = (!c.causal || j <= token) && (!c.window || std::labs(token - j) < c.window || j < c.sinks);
            if (c.docs) seen = seen && x.doc[b * c.Tk + token] == x.doc[b * c.Tk + j];
            if (c.pads) seen = seen && !x.pad[b * c.Tk + j];
            if (seen) logit[j] = s, top = std::max(top, s);
        }
        if (top == -INFINITY) continue;
        double sum = 0;
        Vec o(c.Dv);
        for (long j = 0; j < c.Tk; j++) {
            double w = std::exp(logit[j] - top);
            sum += w;
            for (long d = 0; d < c.Dv; d++) o[d] += w * x.v[(kv * c.Tk + j) * c.Dv + d];
        }
        for (long d = 0; d < c.Dv; d++) {
            total += o[d] / sum * x.d_out[row * c.Dv + d];
            if (out) (*out)[row * c.Dv + d] = o[d] / sum;
        }
        total += (top + std::log(sum)) * x.d_lse[row];
    }
    return total;
}

static int bad = 0;
static void close(const char *what, double got, double want, double scale) {
    if (std::fabs(got - want) <= 2e-4 * scale) return;
    if (bad++ < 20) std::printf("%s: got %g, expected %g\n", what, got, want);
}

// The derivative along a random direction by a central difference, against the kernel's gradient.
template <class T, class G> static void along(Data &x, std::vector<T> &field, const G &grad, const char *what) {
    if (field.empty()) return;
    std::vector<T> kept = field;
    Vec way(field.size()), moved[2];
    double want, dot = 0, size = 0, step = sizeof(T) == 4 ? 4e-3 : 1e-4, ends[2];
    for (auto &w : way) w = uniform(-1, 1);
    for (int i = 0; i < 2; i++) {
        for (size_t n = 0; n < field.size(); n++) field[n] = (T)(kept[n] + (i ? step : -step) * way[n]), moved[i].push_back(field[n]);
        ends[i] = loss(x);
    }
    for (size_t n = 0; n < field.size(); n++) {
        double gone = (moved[1][n] - moved[0][n]) / (2 * step);
        dot += gone * grad[n];
        size += std::fabs(gone * grad[n]);
    }
    want = (ends[1] - ends[0]) / (2 * step);
    field = kept;
    close(what, dot, want, size + 1);
}

static void run(const Case &c) {
    Data x{c};
    long rows = c.B * c.H * c.Tq, keys = c.B * c.H * c.Tk, kv = c.B * c.KV * c.Tk, tiles = (c.Tk + BK - 1) / BK;
    x.q = random<float>(rows * c.D); x.k = random<float>(kv * c.D); x.v = random<float>(kv * c.Dv);
    x.cq = random<double>(c.R * rows, 0, 3); x.ck = random<double>(c.R * keys, 0, 3);
    x.rq = random<float>(c.R * rows); x.rk = random<float>(c.R * keys);
    x.pq = random<float>(c.P * c.B * c.HP * c.Tq); x.pk = random<float>(c.P * c.B * c.HP * c.Tk); x.pr = random<float>(c.P ? c.H : 0, 0, 0.3);
    x.d_out = random<float>(rows * c.Dv); x.d_lse = random<float>(rows);
    for (long j = 0; j < c.B * c.Tk; j++) x.doc.push_back(j % c.Tk / 40), x.pad.push_back(j % 7 == 3);
    std::vector<float> out(rows * c.Dv), lse(rows), norms(rows * 2), d_q(rows * c.D), d_k(kv * c.D), d_v(kv * c.Dv);
    std::vector<float> d_pq(rows * c.P), d_pk(keys * c.P);
    std::vector<int64_t> work(c.B * c.H * 2);
    Vec norm(c.B * c.KV * tiles), range(c.R * c.B * c.H * tiles * 4), d_pr(c.B * c.H);
    Vec d_c_q(c.R * rows), d_c_k(c.R * keys), d_rq(c.R * rows), d_rk(c.R * keys);
    Problem p = {};
    p.B = c.B; p.H = c.H; p.KV = c.KV; p.HP = c.HP; p.Tq = c.Tq; p.Tk = c.Tk; p.D = c.D; p.Dv = c.Dv; p.R = c.R; p.P = c.P;
    p.causal = c.causal; p.window = c.window; p.sinks = c.sinks; p.bounded = c.bounded; p.threads = 1; p.splits = 1;
    p.scale = 0.5f; p.tau = c.tau;
    int64_t q_stride[4] = {c.B * c.H * c.Tq, c.H * c.Tq, c.Tq, 1}, k_stride[4] = {c.B * c.H * c.Tk, c.H * c.Tk, c.Tk, 1};
    for (int i = 0; i < 4; i++) p.cq_stride[i] = p.rq_stride[i] = q_stride[i], p.ck_stride[i] = p.rk_stride[i] = k_stride[i];
    p.q = x.q.data(); p.k = x.k.data(); p.v = x.v.data(); p.c_q = x.cq.data(); p.c_k = x.ck.data();
    p.rate_q = x.rq.data(); p.rate_k = x.rk.data(); p.probe_q = x.pq.data(); p.probe_k = x.pk.data(); p.path_rate = x.pr.data();
    p.documents = c.docs ? x.doc.data() : nullptr; p.key_padding = c.pads ? x.pad.data() : nullptr;
    p.out = out.data(); p.lse = lse.data(); p.norms = norms.data(); p.work = work.data();
    p.key_norm = norm.data(); p.slope_range = range.data();
    grape_forward(&p);
    p.d_out = x.d_out.data(); p.d_lse = x.d_lse.data(); p.d_q = d_q.data(); p.d_k = d_k.data(); p.d_v = d_v.data();
    p.d_c_q = d_c_q.data(); p.d_c_k = d_c_k.data(); p.d_rate_q = d_rq.data(); p.d_rate_k = d_rk.data();
    p.d_probe_q = d_pq.data(); p.d_probe_k = d_pk.data(); p.d_path_rate = d_pr.data();
    grape_backward(&p);
    Vec want(rows * c.Dv);
    loss(x, &want);
    for (size_t i = 0; i < want.size(); i++) close("out", out[i], want[i], 0.1);
    along(x, x.q, d_q, "d_q"); along(x, x.k, d_k, "d_k"); along(x, x.v, d_v, "d_v");
    along(x, x.cq, d_c_q, "d_c_q"); along(x, x.ck, d_c_k, "d_c_k"); along(x, x.rq, d_rq, "d_rate_q"); along(x, x.rk, d_rk, "d_rate_k");
    if (c.P && c.H == c.HP) {
        along(x, x.pq, d_pq, "d_probe_q"); along(x, x.pk, d_pk, "d_probe_k");
        Vec sum(c.H);
        for (long i = 0; i < c.B * c.H; i++) sum[i % c.H] += d_pr[i];
        along(x, x.pr, sum, "d_path_rate");
    }
}

// Every float16 and bfloat16 number, by its definition.
static void conversions() {
    for (long first = 0; first < 65536; first += W) {
        Half half[W];
        Brain brain[W];
        for (int i = 0; i < W; i++) half[i].bits = brain[i].bits = (uint16_t)(first + i);
        vf of_half = widen(half), of_brain = widen(brain);
        for (int i = 0; i < W; i++) {
            long x = first + i, exponent = x >> 10 & 31, fraction = x & 1023;
            double size = exponent == 31 ? fraction ? NAN : INFINITY
                        : exponent ? std::ldexp(1024 + fraction, (int)exponent - 25) : std::ldexp(fraction, -24);
            double want = x >> 15 ? -size : size;
            if (std::isnan(want) ? of_half[i] == of_half[i] : of_half[i] != want) bad++;
            if (bits(of_brain)[i] != (int32_t)(x << 16)) bad++;
        }
    }
}

static void decode(long B, long H, long KV, long Tq, long Tk, long D, long Dv, float tau) {
    long group = H / KV;
    auto q = random<float>(B * H * Tq * D), k = random<float>(B * KV * Tk * D), v = random<float>(B * KV * Tk * Dv);
    std::vector<float> rows(H * Tq * Tk), bound(B * KV, std::sqrt((float)D)), out(B * H * Tq * Dv);
    std::vector<int64_t> read(B * KV);
    for (long i = 0; i < H * Tq * Tk; i++) rows[i] = -0.1f * (Tk - 1 - i % Tk);
    Decode p = {B, H, KV, Tq, Tk, D, Dv, 1, {H * Tq * D, Tq * D, D}, {KV * Tk * D, Tk * D, D}, {KV * Tk * Dv, Tk * Dv, Dv},
                {0, Tq * Tk, Tk}, 0.5f, tau, q.data(), k.data(), v.data(), rows.data(), bound.data(), out.data(), read.data()};
    if (!grape_decode(&p, 4)) bad++;
    for (long i = 0; i < B * H * Tq; i++) {
        long b = i / (H * Tq), h = i / Tq % H, kv = b * KV + h / group;
        double sum = 0;
        Vec o(Dv);
        for (long j = 0; j < Tk; j++) {
            double s = 0;
            for (long d = 0; d < D; d++) s += (double)q[i * D + d] * k[(kv * Tk + j) * D + d];
            double w = std::exp(s * 0.5 + rows[(h * Tq + i % Tq) * Tk + j]);
            sum += w;
            for (long d = 0; d < Dv; d++) o[d] += w * v[(kv * Tk + j) * Dv + d];
        }
        for (long d = 0; d < Dv; d++) close("decode", out[i * Dv + d], o[d] / sum, 0.1);
    }
    for (long n : read) if (tau < 0 ? n != Tk : n >= Tk) bad++;
}

int main() {
    conversions();
    decode(2, 4, 2, 3, 300, 7, 9, -1);
    decode(1, 2, 2, 1, 900, 16, 16, 20);
    //   B  H KV HP  Tq   Tk  D Dv  R  P causal window sinks bounded docs pads tau
    run({1, 2, 1, 2, 70, 70, 16, 16, 0, 0, 1, 0, 0, 0, 0, 0, -1});
    run({2, 2, 2, 2, 30, 90, 7, 5, 2, 0, 1, 0, 0, 0, 0, 1, 40});
    run({1, 4, 2, 4, 80, 80, 24, 8, 1, 3, 1, 33, 2, 0, 0, 0, -1});
    run({1, 2, 2, 2, 65, 65, 8, 9, 0, 8, 0, 0, 0, 1, 1, 0, 40});
    run({1, 2, 1, 2, 100, 130, 12, 20, 1, 5, 0, 50, 70, 0, 1, 1, 40});
    std::printf(bad ? "%d numbers are wrong\n" : "all right, %d wrong, %d lanes\n", bad, W);
    return bad != 0;
}
