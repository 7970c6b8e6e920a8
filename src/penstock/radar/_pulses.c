/* Where do packets lie, how do pulses become numbers, and numbers sums, in one pass over the memory?
 *
 * Loops that Python would need a step for each packet for, or numpy several passes: heads of
 * packets one behind the other, values as they travel to float32, and the sums of products of
 * samples that the moments of a beam are made of. The sizes of all buffers are checked here.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
#define FAST __attribute__((target_clones("default", "avx2,fma", "avx512f")))
#else
#define FAST
#endif

/* Gates summed at once, and pulses after which the sums go on in double precision. */
enum { BLOCK = 256, TURN = 64, MOST_CHANNELS = 4 };
/* What LROSE has for a value of exactly zero, so that logarithms are finite. */
static const float NOTHING = 1e-20f;

/* --- packets --------------------------------------------------------------------------------- */

/* Ids are this and a kind. What the kinds are is a table of the caller's: the bytes that each needs
 * at least, and how many more it may have. */
enum { ID_BASE = 0x77770000, LAST_KIND = 0x3E8, LARGEST = 10000000, HEAD = 8 };
/* Kinds that say themselves how long they are, and where. */
enum { PULSE = 0x0C, BURST = 0x11 };
enum { N_GATES = 108, N_CHANNELS = 112, ENCODING = 116, N_DATA = 136, N_GATES_BURST = 212 };
enum { N_SAMPLES = 64, BURST_ENCODING = 72 };
enum { PULSE_CHANNELS = 4, PULSE_GATES = 1000000 };
/* Bytes of a value by its encoding; 0: there is none. */
static const int VALUE_BYTES[] = {0, 4, 2, 2, 2, 4};

typedef struct {
    Py_buffer data, least, extra;
} Packets;

typedef struct {
    int kind, is_swapped, length;
} Head;

static int packets_parsed(Packets *packets)
{
    Py_ssize_t size = (LAST_KIND + 1) * sizeof(int32_t);
    if (packets->least.len >= size && packets->extra.len >= size) return 1;
    PyErr_SetString(PyExc_ValueError, "a table of packets has too few kinds");
    return 0;
}

static void packets_release(Packets *packets)
{
    PyBuffer_Release(&packets->data);
    PyBuffer_Release(&packets->least);
    PyBuffer_Release(&packets->extra);
}

static int32_t number_at(const char *at, int is_swapped)
{
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return (int32_t) (is_swapped ? __builtin_bswap32(value) : value);
}

/* Bytes of a pulse or burst with its values, or more than any packet has. */
static int64_t size_with_values(const char *at, int kind, int is_swapped, int64_t least)
{
    int encoding = number_at(at + (kind == PULSE ? ENCODING : BURST_ENCODING), is_swapped);
    if (encoding < 1 || encoding > 5) return LARGEST + 1;
    int64_t values;
    if (kind == PULSE) {
        int64_t gates = number_at(at + N_GATES, is_swapped);
        int64_t channels = number_at(at + N_CHANNELS, is_swapped);
        int64_t burst = number_at(at + N_GATES_BURST, is_swapped);
        int64_t data = number_at(at + N_DATA, is_swapped);
        if (channels < 1 || channels > PULSE_CHANNELS || gates < 0 || gates > PULSE_GATES
            || burst < 0 || burst > PULSE_GATES || data > LARGEST)
            return LARGEST + 1;
        values = 2 * channels * (gates + burst);
        if (data > values) values = data;
    } else {
        int64_t samples = number_at(at + N_SAMPLES, is_swapped);
        if (samples < 0 || samples > PULSE_GATES) return LARGEST + 1;
        values = 2 * samples;
    }
    return least + values * VALUE_BYTES[encoding];
}

/* What a packet says of itself: 1, if it can be one; 0: it is none; -1: too few bytes tell. */
static int head_at(const Packets *packets, Py_ssize_t place, int is_exact, Head *head)
{
    const char *at = (const char *) packets->data.buf + place;
    Py_ssize_t left = packets->data.len - place;
    if (left < HEAD) return -1;
    for (head->is_swapped = 0; head->is_swapped < 2; head->is_swapped++) {
        int64_t kind = (int64_t) number_at(at, head->is_swapped) - ID_BASE;
        if (kind < 1 || kind > LAST_KIND) continue;
        int64_t needed = ((const int32_t *) packets->least.buf)[kind];
        int64_t extra = ((const int32_t *) packets->extra.buf)[kind];
        head->kind = (int) kind;
        head->length = number_at(at + 4, head->is_swapped);
        if (head->length < needed || head->length > LARGEST) return 0;
        if (left < needed) return -1;
        if (kind == PULSE || kind == BURST)
            needed = size_with_values(at, head->kind, head->is_swapped, needed);
        if (is_exact && extra < LARGEST) extra = 0;
        return needed <= head->length && head->length <= needed + extra;
    }
    return 0;
}

/* Whether packets of equal heads are of one shape as well. */
static int are_alike(const char *one, const char *other, int kind)
{
    if (kind == PULSE)
        return !memcmp(one + N_GATES, other + N_GATES, 12) && !memcmp(one + N_DATA, other + N_DATA, 4)
               && !memcmp(one + N_GATES_BURST, other + N_GATES_BURST, 4);
    if (kind == BURST)
        return !memcmp(one + N_SAMPLES, other + N_SAMPLES, 4)
               && !memcmp(one + BURST_ENCODING, other + BURST_ENCODING, 4);
    return 1;
}

static PyObject *head(PyObject *self, PyObject *args)
{
    (void) self;
    Packets packets;
    Py_ssize_t place;
    int is_exact;
    if (!PyArg_ParseTuple(args, "y*npy*y*", &packets.data, &place, &is_exact, &packets.least,
                          &packets.extra))
        return NULL;
    PyObject *answer = NULL;
    Head found = {0};
    if (packets_parsed(&packets)) {
        if (place < 0 || place > packets.data.len)
            PyErr_SetString(PyExc_ValueError, "a packet lies outside of its buffer");
        else
            switch (head_at(&packets, place, is_exact, &found)) {
            case 1:
                answer = Py_BuildValue("iii", found.kind, found.is_swapped, found.length);
                break;
            case 0: answer = Py_NewRef(Py_None); break;
            default: answer = Py_BuildValue("iii", -1, 0, 0);
            }
    }
    packets_release(&packets);
    return answer;
}

static PyObject *in_line(PyObject *self, PyObject *args)
{
    (void) self;
    Packets packets;
    Py_buffer out;
    Py_ssize_t place;
    if (!PyArg_ParseTuple(args, "y*ny*y*w*", &packets.data, &place, &packets.least, &packets.extra,
                          &out))
        return NULL;
    Py_ssize_t count = 0, most = out.len / (5 * (Py_ssize_t) sizeof(int64_t));
    Py_ssize_t size = packets.data.len;
    int is_ok = packets_parsed(&packets);
    if (is_ok && (place < 0 || place > size)) {
        PyErr_SetString(PyExc_ValueError, "a packet lies outside of its buffer");
        is_ok = 0;
    }
    if (is_ok) {
        Py_BEGIN_ALLOW_THREADS
        const char *data = packets.data.buf;
        int64_t (*runs)[5] = out.buf;
        Head now, next;
        int is_good = place < size && head_at(&packets, place, 0, &now) == 1;
        while (is_good && now.length <= size - place) {
            Py_ssize_t end = place + now.length;
            if (end < size) {
                is_good = head_at(&packets, end, 0, &next) == 1 && next.is_swapped == now.is_swapped;
                if (!is_good) break; /* what this is, whoever looks closer has to say */
            }
            int64_t *run = count ? runs[count - 1] : NULL;
            if (run && run[0] == now.kind && run[1] == now.is_swapped && run[3] == now.length
                && are_alike(data + run[2], data + place, now.kind)) {
                run[4]++;
            } else {
                if (count == most) break;
                run = runs[count++];
                run[0] = now.kind;
                run[1] = now.is_swapped;
                run[2] = place;
                run[3] = now.length;
                run[4] = 1;
            }
            place = end;
            if (end == size) break;
            now = next;
        }
        Py_END_ALLOW_THREADS
    }
    packets_release(&packets);
    PyBuffer_Release(&out);
    return is_ok ? Py_BuildValue("nn", count, place) : NULL;
}

/* --- values ---------------------------------------------------------------------------------- */

/* Values at any place: what stands before them may have any length. */
typedef float LooseFloat __attribute__((aligned(1), may_alias));
typedef int16_t LooseShort __attribute__((aligned(1), may_alias));

FAST static void copy_row(float *restrict out, const LooseFloat *restrict in, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++)
        out[i] = in[i] == 0.0f ? NOTHING : in[i];
}

FAST static void scale_row(float *restrict out, const LooseShort *restrict in, float scale,
                           Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        float value = (float) in[i] * scale;
        out[i] = value == 0.0f ? NOTHING : value;
    }
}

/* Parts of some bytes, all of one size, by the places where they begin. */
typedef struct {
    Py_buffer data, places, out, scales;
    Py_ssize_t size;
} Rows;

static Py_ssize_t rows_count(const Rows *rows)
{
    return rows->places.len / (Py_ssize_t) sizeof(int64_t);
}

/* Check that rows of `size` times `width` bytes are there, and have room as so many times `made`. */
static int rows_fit(const Rows *rows, Py_ssize_t width, Py_ssize_t made)
{
    Py_ssize_t count = rows_count(rows);
    const int64_t *places = rows->places.buf;
    int is_ok = rows->size >= 0 && rows->size <= rows->data.len / width;
    if (is_ok && rows->size) is_ok = count <= rows->out.len / made / rows->size;
    if (is_ok && rows->scales.buf) is_ok = count <= rows->scales.len / (Py_ssize_t) sizeof(float);
    for (Py_ssize_t i = 0; is_ok && i < count; i++)
        is_ok = places[i] >= 0 && places[i] <= rows->data.len - rows->size * width;
    if (!is_ok && count) PyErr_SetString(PyExc_ValueError, "pulses lie outside of their buffers");
    return is_ok || !count;
}

static void rows_release(Rows *rows)
{
    PyBuffer_Release(&rows->data);
    PyBuffer_Release(&rows->places);
    PyBuffer_Release(&rows->out);
    if (rows->scales.obj) PyBuffer_Release(&rows->scales);
}

static PyObject *gather(PyObject *self, PyObject *args)
{
    (void) self;
    Rows rows = {0};
    if (!PyArg_ParseTuple(args, "y*y*nw*", &rows.data, &rows.places, &rows.size, &rows.out))
        return NULL;
    int is_ok = rows_fit(&rows, 1, 1);
    if (is_ok) {
        Py_BEGIN_ALLOW_THREADS
        const int64_t *places = rows.places.buf;
        for (Py_ssize_t i = 0, count = rows_count(&rows); i < count; i++)
            memcpy((char *) rows.out.buf + i * rows.size, (const char *) rows.data.buf + places[i],
                   rows.size);
        Py_END_ALLOW_THREADS
    }
    rows_release(&rows);
    if (!is_ok) return NULL;
    Py_RETURN_NONE;
}

static PyObject *fl32(PyObject *self, PyObject *args)
{
    (void) self;
    Rows rows = {0};
    if (!PyArg_ParseTuple(args, "y*y*nw*", &rows.data, &rows.places, &rows.size, &rows.out))
        return NULL;
    int is_ok = rows_fit(&rows, 4, 4);
    if (is_ok) {
        Py_BEGIN_ALLOW_THREADS
        const int64_t *places = rows.places.buf;
        for (Py_ssize_t i = 0, count = rows_count(&rows); i < count; i++)
            copy_row((float *) rows.out.buf + i * rows.size,
                     (const LooseFloat *) ((const char *) rows.data.buf + places[i]), rows.size);
        Py_END_ALLOW_THREADS
    }
    rows_release(&rows);
    if (!is_ok) return NULL;
    Py_RETURN_NONE;
}

static PyObject *si16(PyObject *self, PyObject *args)
{
    (void) self;
    Rows rows = {0};
    if (!PyArg_ParseTuple(args, "y*y*ny*w*", &rows.data, &rows.places, &rows.size, &rows.scales,
                          &rows.out))
        return NULL;
    int is_ok = rows_fit(&rows, 2, 4);
    if (is_ok) {
        Py_BEGIN_ALLOW_THREADS
        const int64_t *places = rows.places.buf;
        const float *scales = rows.scales.buf;
        for (Py_ssize_t i = 0, count = rows_count(&rows); i < count; i++)
            scale_row((float *) rows.out.buf + i * rows.size,
                      (const LooseShort *) ((const char *) rows.data.buf + places[i]), scales[i],
                      rows.size);
        Py_END_ALLOW_THREADS
    }
    rows_release(&rows);
    if (!is_ok) return NULL;
    Py_RETURN_NONE;
}

/* --- sums ------------------------------------------------------------------------------------ */

/* Eight complex numbers. Their order in memory stays: products of I with I and of Q with Q, or of
 * Q with I and of I with Q, are summed in turns and brought together at the end. Every machine
 * adds in the same order, so that all have the same sums. */
typedef float Eight __attribute__((vector_size(64), aligned(4)));
typedef int32_t Places __attribute__((vector_size(64)));
enum { LANES = 16 };

/* I and Q in each other's place. A macro: a function is compiled for one kind of machine. */
#define SWAPPED(x) __builtin_shuffle((x), (Places) {1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14})

/* Sums over some gates: of y y*, and of x y*, both parts. */
typedef struct {
    float power[2 * BLOCK], real[2 * BLOCK], turn[2 * BLOCK];
} Sums;

/* Add one pulse y, and its product with a later one, x, if there is. */
FAST static void add_one(Sums *restrict sums, const float *restrict x, const float *restrict y,
                         Py_ssize_t gates)
{
    for (Py_ssize_t i = 0; i < 2 * gates; i++)
        sums->power[i] += y[i] * y[i];
    if (!x) return;
    for (Py_ssize_t i = 0; i < 2 * gates; i++) {
        sums->real[i] += x[i] * y[i];
        sums->turn[i] += x[i ^ 1] * y[i];
    }
}

/* Add four pulses at once, each with the one behind it: sums are loaded and stored once. */
FAST static void add_four(Sums *restrict sums, const float *restrict x, Py_ssize_t step,
                          Py_ssize_t gates)
{
    Py_ssize_t i = 0;
    for (; i + LANES <= 2 * gates; i += LANES) {
        Eight a = *(const Eight *) (x + i), b = *(const Eight *) (x + step + i);
        Eight c = *(const Eight *) (x + 2 * step + i), d = *(const Eight *) (x + 3 * step + i);
        Eight e = *(const Eight *) (x + 4 * step + i);
        Eight *power = (Eight *) (sums->power + i), *real = (Eight *) (sums->real + i);
        Eight *turn = (Eight *) (sums->turn + i);
        *power = *power + a * a + b * b + c * c + d * d;
        *real = *real + b * a + c * b + d * c + e * d;
        *turn = *turn + SWAPPED(b) * a + SWAPPED(c) * b + SWAPPED(d) * c + SWAPPED(e) * d;
    }
    for (; i < 2 * gates; i++)
        for (int p = 0; p < 4; p++) {
            const float *y = x + p * step;
            sums->power[i] += y[i] * y[i];
            sums->real[i] += y[step + i] * y[i];
            sums->turn[i] += y[step + (i ^ 1)] * y[i];
        }
}

/* Add the products of four pulses of one channel, x, with those of another, y. */
FAST static void add_cross(Sums *restrict sums, const float *restrict x, const float *restrict y,
                           Py_ssize_t step, Py_ssize_t pulses, Py_ssize_t gates)
{
    Py_ssize_t i = 0;
    if (pulses == 4)
        for (; i + LANES <= 2 * gates; i += LANES) {
            Eight *real = (Eight *) (sums->real + i), *turn = (Eight *) (sums->turn + i);
            Eight r = *real, t = *turn;
            for (int p = 0; p < 4; p++) {
                Eight a = *(const Eight *) (x + p * step + i);
                Eight b = *(const Eight *) (y + p * step + i);
                r += a * b;
                t += SWAPPED(a) * b;
            }
            *real = r;
            *turn = t;
        }
    for (; i < 2 * gates; i++)
        for (Py_ssize_t p = 0; p < pulses; p++) {
            sums->real[i] += x[p * step + i] * y[p * step + i];
            sums->turn[i] += x[p * step + (i ^ 1)] * y[p * step + i];
        }
}

/* Move sums to three rows in double precision: power, real and imaginary part. */
static void settle(Sums *sums, double *out, Py_ssize_t row, Py_ssize_t gates)
{
    for (Py_ssize_t g = 0; g < gates; g++) {
        out[g] += (double) sums->power[2 * g] + sums->power[2 * g + 1];
        out[row + g] += (double) sums->real[2 * g] + sums->real[2 * g + 1];
        out[2 * row + g] += (double) sums->turn[2 * g] - sums->turn[2 * g + 1];
    }
    memset(sums, 0, sizeof *sums);
}

/* One dwell, some gates: of each channel power and product with the pulse `lag` before; then the
 * product of both channels. With that, powers and product are those of all pulses but the last, as
 * LROSE has them: of the same pulses as the earlier ones of the pairs. */
static void dwell(const float *iq, Py_ssize_t pulses, Py_ssize_t channels, Py_ssize_t gates,
                  Py_ssize_t first, Py_ssize_t lag, int is_cross, double *out)
{
    Py_ssize_t some = gates - first < BLOCK ? gates - first : BLOCK;
    Py_ssize_t step = 2 * channels * gates;
    Sums sums[MOST_CHANNELS + 1];
    memset(sums, 0, sizeof sums);
    Py_ssize_t counted = is_cross && pulses > 1 ? pulses - 1 : pulses;
    Py_ssize_t after = 0; /* pulses since the sums were settled */
    for (Py_ssize_t p = 0; p < counted;) {
        const float *x = iq + p * step + 2 * first;
        Py_ssize_t now = lag == 1 && p + 5 <= pulses ? 4 : 1;
        for (Py_ssize_t c = 0; c < channels; c++, x += 2 * gates) {
            if (now == 4)
                add_four(&sums[c], x, step, some);
            else
                add_one(&sums[c], p + lag < pulses ? x + lag * step : NULL, x, some);
        }
        if (is_cross) {
            const float *h = iq + p * step + 2 * first;
            add_cross(&sums[channels], h + 2 * gates, h, step, now, some);
        }
        p += now;
        after += now;
        if (after >= TURN || p >= counted) {
            after = 0;
            for (Py_ssize_t c = 0; c < channels + (is_cross ? 1 : 0); c++)
                settle(&sums[c], out + 3 * c * gates + first, gates, some);
        }
    }
}

static PyObject *pulse_pairs(PyObject *self, PyObject *args)
{
    (void) self;
    Py_buffer iq, out;
    Py_ssize_t dwells, pulses, channels, gates, lag;
    int is_cross;
    if (!PyArg_ParseTuple(args, "y*nnnnnpw*", &iq, &dwells, &pulses, &channels, &gates, &lag,
                          &is_cross, &out))
        return NULL;
    Py_ssize_t rows = 3 * (channels + (is_cross ? 1 : 0));
    int is_ok = dwells >= 0 && pulses >= 0 && gates >= 0 && lag >= 1 && channels >= 1
                && channels <= MOST_CHANNELS && (!is_cross || channels >= 2) && pulses <= 1 << 24
                && gates <= 1 << 24;
    if (is_ok && pulses && gates)
        is_ok = dwells <= iq.len / 8 / channels / gates / pulses;
    if (is_ok && gates)
        is_ok = dwells <= out.len / 8 / rows / gates;
    if (!is_ok) {
        PyBuffer_Release(&iq);
        PyBuffer_Release(&out);
        PyErr_SetString(PyExc_ValueError, "samples or sums do not fit their buffers");
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    memset(out.buf, 0, dwells * rows * gates * sizeof(double));
    for (Py_ssize_t d = 0; d < dwells; d++)
        for (Py_ssize_t first = 0; first < gates; first += BLOCK)
            dwell((const float *) iq.buf + d * pulses * channels * gates * 2, pulses, channels,
                  gates, first, lag, is_cross, (double *) out.buf + d * rows * gates);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&iq);
    PyBuffer_Release(&out);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"head", head, METH_VARARGS, "Say what a packet at a place says of itself."},
    {"in_line", in_line, METH_VARARGS, "Find packets one behind the other."},
    {"gather", gather, METH_VARARGS, "Copy parts of some bytes, one behind the other."},
    {"fl32", fl32, METH_VARARGS, "Copy float32 values of pulses; zero becomes 1e-20."},
    {"si16", si16, METH_VARARGS, "Scale 16-bit values of pulses to float32."},
    {"pulse_pairs", pulse_pairs, METH_VARARGS, "Sum the products of samples over dwells."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_pulses", "Loops over the samples of pulses.", 0, methods,
};

PyMODINIT_FUNC PyInit__pulses(void)
{
    return PyModule_Create(&module);
}
