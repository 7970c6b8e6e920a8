/* How do messages get into and out of a wide queue at the speed of memory?
 *
 * The ring itself is in include/penstock/ring.h. This file gives it to Python: the bases of the
 * reader and the writer, with the regular case of every call in C. Irregular cases - a held
 * reader to wait for, disk space to allocate, messages that were lost - call a method of the Python
 * class, which decides, and the call continues.
 */
#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>
#include <structmember.h>

#include <penstock/ring.h>

#include "_areas.h"

enum {
    LARGE = 256 << 10, /* from this size on, copy without the interpreter's lock */
    FEW = 16 << 10,    /* bytes that are written to new pages of a file as fast by page faults */
    RUN = 64           /* messages copied before a reader checks whether they were overwritten */
};
/* Longest sleep: a killed writer wakes no reader. */
#define SLICE PENSTOCK_SECOND
/* How often an idle reader checks whether its path names another queue. */
#define LOOK (PENSTOCK_SECOND / 4)

static PyObject *message_type, *copied_type, *stream_id_type;

/* Copy a payload; a large one without the interpreter's lock. */
static void copy_payload(void *to, const void *from, uint64_t n) {
#ifdef PENSTOCK_FAULTS /* a half-written payload is a state to test, too */
    penstock_copy(to, from, n / 2);
    PENSTOCK_FAULT_POINT();
    to = (char *)to + n / 2, from = (const char *)from + n / 2, n -= n / 2;
#endif
    if (n < LARGE) {
        penstock_copy(to, from, n);
        return;
    }
    Py_BEGIN_ALLOW_THREADS
    penstock_copy(to, from, n);
    Py_END_ALLOW_THREADS
}

/* Convert a timeout to a deadline; None: forever. False: an error is set. */
static bool parse_timeout(PyObject *timeout, int64_t *deadline) {
    *deadline = INT64_MAX;
    if (timeout == NULL || timeout == Py_None)
        return true;
    double seconds = PyFloat_AsDouble(timeout);
    if (!(seconds > 0))
        *deadline = 0;
    else if (seconds < 1e9)
        *deadline = penstock_clock(CLOCK_MONOTONIC) + (int64_t)(seconds * 1e9);
    return !(seconds == -1.0 && PyErr_Occurred());
}

/* Parse positional and named arguments; missing ones stay NULL. */
static bool parse_arguments(const char *const *names, Py_ssize_t count, PyObject *const *args,
                            Py_ssize_t given, PyObject *keywords, PyObject **out) {
    if (given > count)
        return PyErr_Format(PyExc_TypeError, "takes %zd arguments, not %zd", count, given), false;
    for (Py_ssize_t i = 0; i < count; i++)
        out[i] = i < given ? args[i] : NULL;
    for (Py_ssize_t k = 0; keywords != NULL && k < PyTuple_GET_SIZE(keywords); k++) {
        PyObject *name = PyTuple_GET_ITEM(keywords, k);
        Py_ssize_t i = 0;
        while (i < count && PyUnicode_CompareWithASCIIString(name, names[i]) != 0)
            i++;
        if (i == count || out[i] != NULL)
            return PyErr_Format(PyExc_TypeError, "there is no argument %R, or two", name), false;
        out[i] = args[given + k];
    }
    if (out[0] == NULL)
        PyErr_Format(PyExc_TypeError, "%s is missing", names[0]);
    return out[0] != NULL;
}

/* Convert an integer argument within its range. */
static bool int_argument(PyObject *value, const char *name, int64_t least, int64_t most, int64_t *out) {
    int overflow;
    if (value == NULL || value == Py_None)
        return true;
    long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (number == -1 && PyErr_Occurred())
        return false;
    if (overflow != 0 || number < least || number > most)
        return PyErr_Format(PyExc_OverflowError, "%s does not fit in %d bits", name,
                            most == INT32_MAX ? 32 : 64), false;
    *out = number;
    return true;
}

/* The part that readers and writers share: the mapped memory. */
typedef struct {
    PyObject_HEAD
    Py_buffer memory; /* .obj is NULL when closed */
    Area *area;       /* tells whether the file was truncated; NULL: nobody watches it */
    bool busy;        /* a thread is in a call, maybe without the interpreter's lock */
    bool closing;     /* that thread must leave and close */
} Mapped;

static bool map_buffer(Mapped *self, PyObject *mapping, penstock_ring *ring) {
    self->closing = self->closing && self->memory.obj != NULL; /* a thread may close it meanwhile */
    if (PyObject_GetBuffer(mapping, &self->memory, PyBUF_SIMPLE) != 0)
        return false;
    const char *fault = penstock_header_fault(self->memory.buf, (uint64_t)self->memory.len);
    if (fault != NULL)
        return PyBuffer_Release(&self->memory), PyErr_Format(PyExc_ValueError, "the %s is not right", fault), false;
    *ring = penstock_over(self->memory.buf, !self->memory.readonly);
    self->area = area_of(self->memory.buf);
    return true;
}

static bool is_cut(const Mapped *self) {
    return self->area != NULL && __atomic_load_n(&self->area->is_cut, __ATOMIC_ACQUIRE) != 0;
}

/* Raise for a file that was truncated while mapped; replaces an error that is set. */
static PyObject *raise_cut(PyObject *self) {
    PyErr_Clear();
    Py_XDECREF(PyObject_CallMethod(self, "_raise_cut", NULL));
    return NULL;
}

/* Start a call; false with an error set: closed, or another thread is in a call. */
static bool enter(Mapped *self) {
    if (self->memory.obj == NULL || self->closing)
        Py_XDECREF(PyObject_CallMethod((PyObject *)self, "_raise_closed", NULL));
    else if (self->busy)
        PyErr_SetString(PyExc_RuntimeError, "readers and writers are not safe to share between threads");
    else if (is_cut(self))
        raise_cut((PyObject *)self);
    else
        return self->busy = true;
    return false;
}

/* Close, as another thread requested; an error that is set stays. */
static void close_now(PyObject *self) {
    PyObject *kind, *value, *trace;
    PyErr_Fetch(&kind, &value, &trace);
    Py_XDECREF(PyObject_CallMethod(self, "close", NULL));
    if (kind != NULL)
        PyErr_Restore(kind, value, trace);
}

/* --- the writer ------------------------------------------------------------------------------ */

/* Messages of a log, on their way into its file. */
typedef struct {
    penstock_slot slots[4096];
    uint8_t bytes[256 << 10];
} Run;

typedef struct {
    Mapped mapped;
    penstock_writer w;
    Run *run; /* NULL: none was needed yet */
    int64_t lock_timeout;
    bool sync_each, locked, reserved;
    penstock_slot pending; /* of the reservation */
    int64_t looked;        /* when the path was last checked by Python */
    uint64_t messages, bytes, refused;
} Writer;

/* A message to be appended. */
typedef struct {
    penstock_slot slot;
    const uint8_t *stream, *attributes, *payload;
    const uint8_t *block; /* stream, attributes and origin as they are stored, or NULL */
    int64_t origin_ns;    /* with PENSTOCK_HAS_ORIGIN */
} Entry;

static int hook(Writer *self, const char *name, long code, uint64_t bytes) {
    Py_XDECREF(PyObject_CallMethod((PyObject *)self, name, "lK", code, bytes));
    return PyErr_Occurred() ? -1 : 0;
}

/* Take the lock of many writers. */
static int take_lock(Writer *self) {
    if (self->w.number == 0 || self->locked)
        return 0;
    int error = penstock_lock(&self->w, 0);
    int64_t deadline = error == 0 ? 0 : penstock_clock(CLOCK_MONOTONIC) + self->lock_timeout;
    while (error != 0) {
        int64_t left = deadline - penstock_clock(CLOCK_MONOTONIC);
        if ((error == EINTR && PyErr_CheckSignals() != 0) ||
            (left <= 0 && hook(self, "_lock_timed_out", 0, 0) != 0))
            return -1;
        Py_BEGIN_ALLOW_THREADS
        error = penstock_lock(&self->w, left < SLICE ? left : SLICE);
        Py_END_ALLOW_THREADS
    }
    self->locked = true;
    penstock_code code = penstock_take_over(&self->w);
    return code == PENSTOCK_OK ? 0 : hook(self, "_make_room", code, 0);
}

static void give_lock(Writer *self) {
    if (self->locked && !self->reserved) {
        self->locked = false;
        penstock_unlock(&self->w);
    }
}

/* Let Python check the path, once a second at most. Before a message is placed: a writer that was silent
 * for long would put its next one into a queue that was removed meanwhile. */
static int look_at_path(Writer *self) {
    int64_t now = penstock_clock(CLOCK_MONOTONIC_COARSE);
    if (now - self->looked <= SLICE)
        return 0;
    self->looked = now;
    return hook(self, "_look", 0, 0);
}

static bool writer_enter(Writer *self) {
    if (!enter(&self->mapped))
        return false;
    if (self->reserved)
        PyErr_SetString(PyExc_RuntimeError, "a reservation is under way: commit or abort it first");
    else if (look_at_path(self) == 0 && take_lock(self) == 0)
        return true;
    give_lock(self);
    self->mapped.busy = false;
    if (self->mapped.closing)
        close_now((PyObject *)self);
    return false;
}

/* Make room for a message, and return its address, or NULL. */
static uint8_t *make_room(Writer *self, const Entry *e) {
    uint64_t size = e->slot.block + e->slot.length;
    uint8_t *to;
    penstock_code code;
    while ((code = penstock_begin(&self->w, size, &to)) != PENSTOCK_OK) {
        if (is_cut(&self->mapped)) /* what was placed is lost: `conclude` says so */
            return NULL;
        penstock_publish(&self->w); /* so that held readers can advance */
        if (hook(self, "_make_room", code, size) != 0)
            return NULL;
    }
    return to;
}

/* Make room for a message, write its block, and return the address of its payload, or NULL. */
static uint8_t *begin(Writer *self, const Entry *e) {
    const penstock_slot *slot = &e->slot;
    uint8_t *to = make_room(self, e);
    if (to == NULL)
        return NULL;
    PENSTOCK_FAULT_POINT();
    if (e->block != NULL) {
        memcpy(to, e->block, slot->block);
    } else if (slot->block > 0) {
        uint32_t origin = slot->flags & PENSTOCK_HAS_ORIGIN ? 8 : 0, rest = slot->block - origin;
        if (origin > 0)
            memcpy(to + rest, &e->origin_ns, 8);
        if (rest > 0)
            memset(to + rest - 8, 0, 8); /* the padding */
        if (e->stream != NULL)
            memcpy(to, e->stream, 16);
        PENSTOCK_FAULT_POINT();
        if (slot->attributes > 0)
            memcpy(to + (e->stream == NULL ? 0 : 16), e->attributes, slot->attributes);
    }
    return to + slot->block;
}

/* Place one message; the caller publishes it. */
static int append(Writer *self, Entry *e) {
    uint8_t *to = begin(self, e);
    if (to == NULL)
        return -1;
    PENSTOCK_FAULT_POINT();
    copy_payload(to, e->payload, e->slot.length);
    penstock_finish(&self->w, &e->slot);
    self->bytes += e->slot.length;
    return 0;
}

/* End a write call: publish, count, sync. Returns the last number, or NULL. */
static PyObject *conclude(Writer *self, int failed, uint64_t offered, uint64_t done) {
    if (is_cut(&self->mapped)) { /* placed messages may be lost */
        done -= self->w.planned < done ? self->w.planned : done;
        self->w.planned = 0;
        raise_cut((PyObject *)self);
        failed = 1;
    }
    penstock_publish(&self->w);
    uint64_t last = self->w.head - 1;
    give_lock(self);
    self->messages += done;
    self->refused += offered - done;
    if (!failed && self->sync_each)
        hook(self, "_sync", 0, 0);
    self->mapped.busy = false; /* not earlier: a thread that closes meanwhile leaves that to this one */
    if (self->mapped.closing)
        close_now((PyObject *)self);
    return PyErr_Occurred() ? NULL : PyLong_FromUnsignedLongLong(last);
}

/* The header fields of a message, from arguments type .. origin_ns. */
static bool parse_header(PyObject **given, Entry *e) {
    int64_t type = 0, subtype = 0;
    PyObject *stream = given[4], *attributes = given[5], *origin = given[6];
    e->slot.time_ns = e->slot.created_ns = penstock_clock(CLOCK_REALTIME);
    if (!int_argument(given[0], "type", INT32_MIN, INT32_MAX, &type) ||
        !int_argument(given[1], "subtype", INT32_MIN, INT32_MAX, &subtype) ||
        !int_argument(given[2], "time_ns", INT64_MIN, INT64_MAX, &e->slot.time_ns) ||
        !int_argument(given[3], "created_ns", INT64_MIN, INT64_MAX, &e->slot.created_ns) ||
        !int_argument(origin, "origin_ns", INT64_MIN, INT64_MAX, &e->origin_ns))
        return false;
    e->slot.type = (int32_t)type;
    e->slot.subtype = (int32_t)subtype;
    if (stream != NULL && stream != Py_None) {
        if (!PyBytes_Check(stream) || PyBytes_GET_SIZE(stream) != 16)
            return PyErr_SetString(PyExc_TypeError, "stream is a StreamId of 16 bytes"), false;
        e->stream = (const uint8_t *)PyBytes_AS_STRING(stream);
        e->slot.flags |= PENSTOCK_HAS_STREAM;
        e->slot.block = 16;
    }
    if (attributes != NULL && attributes != Py_None) {
        if (!PyBytes_Check(attributes) || PyBytes_GET_SIZE(attributes) > INT32_MAX)
            return PyErr_SetString(PyExc_TypeError, "attributes are bytes, below 2 GiB"), false;
        e->attributes = (const uint8_t *)PyBytes_AS_STRING(attributes);
        e->slot.flags |= PENSTOCK_HAS_ATTRIBUTES;
        e->slot.attributes = (uint32_t)PyBytes_GET_SIZE(attributes);
    }
    e->slot.block = (uint32_t)penstock_align(e->slot.block + e->slot.attributes, 8);
    if (origin != NULL && origin != Py_None) {
        e->slot.flags |= PENSTOCK_HAS_ORIGIN;
        e->slot.block += 8;
    }
    return true;
}

/* Append one payload. The fast case, bytes, needs no buffer. */
static int offer(Writer *self, PyObject *payload, Entry *e) {
    if (PyBytes_CheckExact(payload)) {
        e->payload = (const uint8_t *)PyBytes_AS_STRING(payload);
        e->slot.length = (uint64_t)PyBytes_GET_SIZE(payload);
        return append(self, e);
    }
    Py_buffer view;
    if (PyObject_GetBuffer(payload, &view, PyBUF_SIMPLE) != 0)
        return -1;
    e->payload = view.buf;
    e->slot.length = (uint64_t)view.len;
    int failed = append(self, e);
    PyBuffer_Release(&view);
    return failed;
}

static PyObject *writer_write(Writer *self, PyObject *const *args, Py_ssize_t n, PyObject *keywords) {
    static const char *const names[] = {"payload",    "type",   "subtype",   "time_ns",
                                        "created_ns", "stream", "attributes", "origin_ns"};
    PyObject *given[8];
    Entry e = {0};
    if (!parse_arguments(names, 8, args, n, keywords, given))
        return NULL;
    if (!parse_header(given + 1, &e) || !writer_enter(self))
        return self->refused++, NULL;
    int failed = offer(self, given[0], &e);
    return conclude(self, failed, 1, failed ? 0 : 1);
}

static PyObject *writer_write_many(Writer *self, PyObject *const *args, Py_ssize_t n, PyObject *keywords) {
    static const char *const names[] = {"payloads", "type", "subtype"};
    PyObject *given[8] = {NULL};
    Entry e = {0};
    if (!parse_arguments(names, 3, args, n, keywords, given))
        return NULL;
    PyObject *items = PySequence_Tuple(given[0]); /* a private copy that no thread can change */
    if (items == NULL)
        return NULL;
    uint64_t count = (uint64_t)PyTuple_GET_SIZE(items), done = 0;
    bool ready = count > 0 && parse_header(given + 1, &e) && writer_enter(self);
    int failed = 0;
    while (ready && !failed && done < count) {
        failed = offer(self, PyTuple_GET_ITEM(items, (Py_ssize_t)done), &e);
        done += failed == 0;
    }
    Py_DECREF(items);
    if (count == 0)
        Py_RETURN_NONE;
    if (ready)
        return conclude(self, failed, count, done);
    return self->refused += count, NULL;
}

/* write_split(data, ending, type, subtype): append the parts between endings, without an object for each. */
static PyObject *writer_write_split(Writer *self, PyObject *const *args, Py_ssize_t n, PyObject *keywords) {
    static const char *const names[] = {"data", "ending", "type", "subtype"};
    PyObject *given[9] = {NULL};
    Entry e = {0};
    if (!parse_arguments(names, 4, args, n, keywords, given))
        return NULL;
    if (!PyBytes_Check(given[0]) || given[1] == NULL || !PyBytes_Check(given[1]) || PyBytes_GET_SIZE(given[1]) == 0)
        return PyErr_SetString(PyExc_TypeError, "data and ending are bytes, and the ending has some"), NULL;
    const char *at = PyBytes_AS_STRING(given[0]), *end = at + PyBytes_GET_SIZE(given[0]);
    const char *ending = PyBytes_AS_STRING(given[1]), *found;
    size_t size = (size_t)PyBytes_GET_SIZE(given[1]);
    uint64_t offered = 0, done = 0;
    bool ready = parse_header(given + 2, &e) && writer_enter(self);
    int failed = !ready;
    do { /* after a failure, the rest is only counted as refused */
        found = size == 1 ? memchr(at, *ending, (size_t)(end - at)) : memmem(at, (size_t)(end - at), ending, size);
        e.payload = (const uint8_t *)at;
        e.slot.length = (uint64_t)((found == NULL ? end : found) - at);
        failed = failed || append(self, &e) != 0;
        done += failed == 0;
        offered++;
        at = found == NULL ? end : found + size;
    } while (found != NULL);
    if (ready)
        return conclude(self, failed, offered, done);
    return self->refused += offered, NULL;
}

/* write_parts(data, places): append the parts of data at the places, each two numbers of 64 bits: where it begins
 * and ends. There is no object for each. */
static PyObject *writer_write_parts(Writer *self, PyObject *args) {
    Py_buffer data, places;
    if (!PyArg_ParseTuple(args, "y*y*", &data, &places))
        return NULL;
    uint64_t count = (uint64_t)places.len / (2 * sizeof(int64_t)), done = 0;
    PyObject *header[7] = {NULL};
    Entry e = {0};
    bool ready = count > 0 && parse_header(header, &e) && writer_enter(self);
    int failed = 0;
    while (ready && !failed && done < count) {
        const int64_t *place = (int64_t *)places.buf + 2 * done;
        failed = place[0] < 0 || place[1] < place[0] || place[1] > data.len;
        if (failed) {
            PyErr_SetString(PyExc_ValueError, "a place outside of the data");
            break;
        }
        e.payload = (uint8_t *)data.buf + place[0];
        e.slot.length = (uint64_t)(place[1] - place[0]);
        failed = append(self, &e);
        done += failed == 0;
    }
    PyBuffer_Release(&data);
    PyBuffer_Release(&places);
    if (count == 0)
        Py_RETURN_NONE;
    if (ready)
        return conclude(self, failed, count, done);
    return self->refused += count, NULL;
}

/* Rows that Python prepared: their slots, blocks and payloads, and how much of each is placed. */
typedef struct {
    Py_buffer slots, blocks, payloads;
    uint64_t count, done, block, payload;
} Rows;

/* The next row; false: its bytes are missing. */
static bool next_row(const Rows *rows, Entry *e) {
    memset(e, 0, sizeof *e);
    memcpy(&e->slot, (penstock_slot *)rows->slots.buf + rows->done, sizeof e->slot);
    e->block = (uint8_t *)rows->blocks.buf + rows->block;
    e->payload = (uint8_t *)rows->payloads.buf + rows->payload;
    return e->slot.block <= (uint64_t)rows->blocks.len - rows->block &&
           e->slot.length <= (uint64_t)rows->payloads.len - rows->payload;
}

static void row_is_placed(Rows *rows, const Entry *e) {
    rows->done++;
    rows->block += e->slot.block;
    rows->payload += e->slot.length;
}

static bool put(int fd, const void *from, uint64_t bytes, const void *to, const void *base) {
    off_t at = (const uint8_t *)to - (const uint8_t *)base;
    while (bytes > 0) {
        ssize_t n = pwrite(fd, from, bytes, at);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return false;
        from = (const uint8_t *)from + n, at += n, bytes -= (uint64_t)n;
    }
    return true;
}

/* Whether the file is still as long as its mapping. If not, all calls fail from now on: a part of what was cut off may
 * be added again, and then no access to it would fail. */
static bool is_whole(const Writer *self) {
    struct stat file;
    bool whole = fstat(self->w.fd, &file) == 0 && file.st_size >= self->mapped.memory.len;
    if (!whole && self->mapped.area != NULL)
        __atomic_store_n(&self->mapped.area->is_cut, 1, __ATOMIC_RELEASE);
    return whole;
}

/* Bring the `count` messages of the run, which begin at this position of the buffer, to their places in the file. */
static bool put_run(Writer *self, uint64_t count, uint64_t position, uint64_t bytes) {
    const penstock_ring *ring = &self->w.ring;
    const penstock_slot *slots = self->run->slots;
    const void *base = self->mapped.memory.buf;
    uint64_t first = self->w.head & ring->mask, room = ring->mask + 1 - first;
    uint64_t straight = count < room ? count : room; /* the slots after them are at the start of the table */
    if (!is_whole(self))
        return false;
    PENSTOCK_FAULT_POINT();
    bool done = put(self->w.fd, self->run->bytes, bytes, ring->buffer + position, base);
    PENSTOCK_FAULT_POINT();
    done = done && put(self->w.fd, slots, straight * sizeof *slots, ring->slots + first, base) &&
           put(self->w.fd, slots + straight, (count - straight) * sizeof *slots, ring->slots, base);
    PENSTOCK_FAULT_POINT();
    return done && is_whole(self);
}

/* Append the next rows to a log by pwrite, as many as a run has room for: a page fault for each new page would take
 * longer than all the rest. False: none, and the next row is for `append`. Needs no interpreter's lock. */
static bool append_run(Writer *self, Rows *rows) {
    penstock_writer *w = &self->w, before;
    Rows rows_before = *rows;
    uint64_t count = 0, bytes = 0;
    Entry e;
    penstock_publish(w);
    before = *w;
    /* Up to the end of the allocated space, and not into the last page: a truncated file is still shorter afterwards. */
    uint64_t end = w->ring.buffer_size - PENSTOCK_PAGE, most = sizeof self->run->slots / sizeof *self->run->slots;
    end = w->ready_position < end ? w->ready_position : end;
    uint64_t slots = w->tail + w->ring.mask + 1 - w->head, ready = w->ready_seq - w->head;
    most = slots < most ? slots : most;
    most = ready < most ? ready : most;
    while (rows->done < rows->count && count < most && next_row(rows, &e)) {
        uint64_t size = e.slot.block + e.slot.length, room = penstock_align(size, PENSTOCK_ALIGN);
        uint8_t *to = self->run->bytes + bytes;
        if (size > sizeof self->run->bytes - bytes || w->position + room > end)
            break;
        memcpy(to, e.block, e.slot.block);
        memcpy(to + e.slot.block, e.payload, e.slot.length);
        memset(to + size, 0, room - size);
        w->at = w->position;
        penstock_finish_at(w, &e.slot, to, &self->run->slots[count++]);
        row_is_placed(rows, &e);
        bytes += room;
    }
    if (count > 0 && put_run(self, count, before.position, bytes)) {
        penstock_publish(w);
        self->bytes += rows->payload - rows_before.payload;
        return true;
    }
    *w = before;
    *rows = rows_before;
    return false;
}

/* Append rows to a log by runs, as long as there is room. False: the next row is for `append`. */
static bool append_runs(Writer *self, Rows *rows) {
    uint64_t left = (uint64_t)rows->payloads.len - rows->payload + (rows->count - rows->done) * sizeof(penstock_slot);
    uint64_t before = rows->done;
    if (left < FEW || !(self->w.ring.header->flags & PENSTOCK_KEEPS))
        return false;
    if (self->run == NULL && (self->run = PyMem_RawMalloc(sizeof *self->run)) == NULL)
        return false; /* there is another way */
    PyThreadState *lock = left < LARGE ? NULL : PyEval_SaveThread();
    while (append_run(self, rows))
        ;
    if (lock != NULL)
        PyEval_RestoreThread(lock);
    return rows->done > before;
}

/* _write_rows(slots, blocks, payloads): append messages that Python prepared, in order. */
static PyObject *writer_write_rows(Writer *self, PyObject *args) {
    Rows rows = {0};
    Entry e;
    if (!PyArg_ParseTuple(args, "y*y*y*", &rows.slots, &rows.blocks, &rows.payloads))
        return NULL;
    rows.count = (uint64_t)rows.slots.len / sizeof(penstock_slot);
    bool ready = writer_enter(self);
    int failed = 0;
    while (ready && !failed && rows.done < rows.count) {
        failed = !next_row(&rows, &e);
        if (failed)
            PyErr_SetString(PyExc_ValueError, "the rows are longer than their bytes");
        else if ((failed = make_room(self, &e) == NULL) || append_runs(self, &rows))
            continue;
        else if ((failed = is_cut(&self->mapped) || append(self, &e) != 0) == 0) {
            row_is_placed(&rows, &e);
            failed = is_cut(&self->mapped); /* before anything is published */
        }
    }
    PyBuffer_Release(&rows.slots);
    PyBuffer_Release(&rows.blocks);
    PyBuffer_Release(&rows.payloads);
    if (ready)
        return conclude(self, failed, rows.count, rows.done);
    return self->refused += rows.count, NULL;
}

/* Make room for a payload of `size` bytes, and return its offset in the mapping. */
static PyObject *writer_reserve(Writer *self, PyObject *args) {
    PyObject *given[7] = {NULL};
    Entry e = {0};
    long long size;
    if (!PyArg_ParseTuple(args, "LOOOOOO", &size, given, given + 1, given + 2, given + 3, given + 4, given + 5))
        return NULL;
    e.slot.length = (uint64_t)size; /* a negative size is too large */
    if (!parse_header(given, &e) || !writer_enter(self))
        return self->refused++, NULL;
    uint8_t *to = begin(self, &e);
    if (to == NULL)
        return conclude(self, 1, 1, 0);
    self->pending = e.slot;
    if (given[3] == Py_None)
        self->pending.created_ns = INT64_MIN; /* set at commit */
    self->reserved = true;
    self->mapped.busy = false;
    return PyLong_FromSsize_t(to - (uint8_t *)self->mapped.memory.buf);
}

/* Publish the first `size` bytes of the reservation; -1 aborts it. */
static PyObject *writer_commit(Writer *self, PyObject *argument) {
    Py_ssize_t length = PyLong_AsSsize_t(argument);
    if ((length == -1 && PyErr_Occurred()) || !enter(&self->mapped))
        return NULL;
    if (!self->reserved || length > (Py_ssize_t)self->pending.length) {
        self->mapped.busy = false;
        return PyErr_SetString(PyExc_ValueError, "there is no reservation of that size"), NULL;
    }
    self->reserved = false;
    if (length >= 0) {
        self->pending.length = (uint64_t)length;
        if (self->pending.created_ns == INT64_MIN)
            self->pending.created_ns = penstock_clock(CLOCK_REALTIME);
        penstock_finish(&self->w, &self->pending);
        self->bytes += (uint64_t)length;
        return conclude(self, 0, 1, 1);
    }
    give_lock(self);
    self->mapped.busy = false;
    Py_RETURN_NONE;
}

/* _attach(mapping, fd, lock_timeout_ns, sync_each): an errno, or 0. */
static PyObject *writer_attach(Writer *self, PyObject *args) {
    PyObject *mapping;
    int fd, sync_each;
    long long lock_timeout;
    penstock_ring ring;
    penstock_writer w;
    if (!PyArg_ParseTuple(args, "OiLp", &mapping, &fd, &lock_timeout, &sync_each))
        return NULL;
    Mapped old = self->mapped; /* a log switches to its next segment */
    int error = EACCES;
    if (map_buffer(&self->mapped, mapping, &ring) && ring.writable)
        error = penstock_writer_claim(&w, ring, fd);
    if (PyErr_Occurred() || error != 0) {
        if (!PyErr_Occurred())
            PyBuffer_Release(&self->mapped.memory);
        self->mapped = old;
        return PyErr_Occurred() ? NULL : PyLong_FromLong(error);
    }
    if (old.memory.obj != NULL)
        PyBuffer_Release(&old.memory);
    self->w = w;
    self->lock_timeout = lock_timeout;
    self->sync_each = sync_each;
    return PyLong_FromLong(0);
}

/* Resume after the last message; False: the queue is damaged. Many writers do it at every write. */
static PyObject *writer_resume(Writer *self, PyObject *Py_UNUSED(ignored)) {
    return PyBool_FromLong(self->w.number != 0 || penstock_resume(&self->w));
}

/* Detach from the queue. False: a thread is writing. A forked process leaves its parent's lock alone. */
static PyObject *writer_detach(Writer *self, PyObject *is_forked) {
    self->mapped.closing = true;
    if (self->mapped.busy && is_forked != Py_True)
        Py_RETURN_FALSE;
    if (self->mapped.memory.obj != NULL) {
        self->reserved = false;
        if (is_forked != Py_True)
            give_lock(self);
        PyBuffer_Release(&self->mapped.memory);
    }
    Py_RETURN_TRUE;
}

/* _wait_for(rows, holders): set the rows of the reader table (32-bit numbers) to wait for. */
static PyObject *writer_wait_for(Writer *self, PyObject *args) {
    Py_buffer rows;
    unsigned int holders;
    if (!PyArg_ParseTuple(args, "y*I", &rows, &holders))
        return NULL;
    penstock_writer *w = &self->w;
    bool fits = (size_t)rows.len <= sizeof w->held && self->mapped.memory.obj != NULL;
    w->held_count = fits ? (uint32_t)(rows.len / 4) : 0;
    memcpy(w->held, rows.buf, 4 * w->held_count);
    PyBuffer_Release(&rows);
    for (uint32_t i = 0; i < w->held_count; i++)
        fits = fits && w->held[i] < w->ring.header->readers;
    if (!fits)
        return w->held_count = 0, PyErr_SetString(PyExc_ValueError, "there are no such readers"), NULL;
    w->holders = holders;
    w->holding = true;
    w->limit = penstock_held(w);
    Py_RETURN_NONE;
}

/* Sleep up to `seconds` until a held reader moves; returns whether one did. */
static PyObject *writer_sleep_for_room(Writer *self, PyObject *argument) {
    double seconds = PyFloat_AsDouble(argument);
    int error;
    Py_BEGIN_ALLOW_THREADS
    error = penstock_sleep_for_room(&self->w, (int64_t)(seconds * 1e9));
    Py_END_ALLOW_THREADS
    if ((error == EINTR && PyErr_CheckSignals() != 0) || self->mapped.closing)
        return PyErr_Occurred() ? NULL : PyObject_CallMethod((PyObject *)self, "_raise_closed", NULL);
    return PyBool_FromLong(penstock_held(&self->w) > self->w.limit);
}

static void writer_dealloc(Writer *self) {
    Py_XDECREF(writer_detach(self, NULL));
    PyMem_RawFree(self->run);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

#define METHOD(name, function, flags) {name, (PyCFunction)(void (*)(void))(function), flags, NULL}
#define NUMBER(name, kind, field) {name, T_ULONGLONG, offsetof(kind, field), 0, NULL}

static PyMethodDef writer_methods[] = {METHOD("write", writer_write, METH_FASTCALL | METH_KEYWORDS),
                                       METHOD("write_many", writer_write_many, METH_FASTCALL | METH_KEYWORDS),
                                       METHOD("write_split", writer_write_split, METH_FASTCALL | METH_KEYWORDS),
                                       METHOD("write_parts", writer_write_parts, METH_VARARGS),
                                       METHOD("_write_rows", writer_write_rows, METH_VARARGS),
                                       METHOD("_reserve", writer_reserve, METH_VARARGS),
                                       METHOD("_commit", writer_commit, METH_O),
                                       METHOD("_attach", writer_attach, METH_VARARGS),
                                       METHOD("_resume", writer_resume, METH_NOARGS),
                                       METHOD("_detach", writer_detach, METH_O),
                                       METHOD("_wait_for", writer_wait_for, METH_VARARGS),
                                       METHOD("_sleep_for_room", writer_sleep_for_room, METH_O),
                                       {0}};

static PyMemberDef writer_members[] = {NUMBER("_messages", Writer, messages), NUMBER("_bytes", Writer, bytes),
                                       NUMBER("_refused", Writer, refused), NUMBER("_head", Writer, w.head),
                                       NUMBER("_position", Writer, w.position), NUMBER("_limit", Writer, w.limit),
                                       NUMBER("_guard", Writer, w.guard),
                                       NUMBER("_ready_position", Writer, w.ready_position),
                                       NUMBER("_ready_seq", Writer, w.ready_seq),
                                       {"_created_ns", T_LONGLONG, offsetof(Writer, w.created_ns), 0, NULL},
                                       {0}};

#define TYPE(name, kind, ...)                                                                              \
    {PyVarObject_HEAD_INIT(NULL, 0).tp_name = "penstock.queue.wide._ring." name,                          \
     .tp_basicsize = sizeof(kind), .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,                   \
     .tp_new = PyType_GenericNew, __VA_ARGS__}

static PyTypeObject writer_type = TYPE("RingWriter", Writer, .tp_dealloc = (destructor)writer_dealloc,
                                       .tp_methods = writer_methods, .tp_members = writer_members);

/* --- the reader ------------------------------------------------------------------------------ */

typedef struct {
    Mapped mapped;
    penstock_ring ring;
    PyObject *stream;     /* of the queue, or None */
    PyObject *view;       /* the mapping, read-only, for messages in place */
    int entry;            /* row of the reader table, or -1 */
    bool holds;           /* the writer waits for it */
    uint32_t name_crc;    /* of its row */
    bool filters;         /* only messages of `type` are wanted */
    int32_t type;
    uint64_t epoch;        /* that `next` belongs to */
    uint64_t next;         /* number of the message to read next */
    uint64_t head;         /* cached, to avoid loads of the writer's busy cache line */
    uint64_t acknowledged; /* as in the table */
    int64_t looked;        /* when the path was last checked by Python */
    uint64_t messages, bytes, filtered;
} Reader;

/* Store this reader's position in the table: all messages returned before this call are done. */
static void acknowledge(Reader *self) {
    if (self->entry < 0 || self->acknowledged == self->next)
        return;
    self->acknowledged = self->next;
    if (self->holds) {
        penstock_header *h = self->ring.header;
        PENSTOCK_FAULT_POINT();
        penstock_move(&self->ring.readers[self->entry], self->name_crc, self->next);
        PENSTOCK_FAULT_POINT();
        penstock_wake(&h->room_wanted, &h->room_wakes);
    } else
        __atomic_store_n(&self->ring.readers[self->entry].position, self->next, __ATOMIC_RELAXED);
}

/* Create a message from eight fields, which it takes over; NULL if one of them is NULL. */
static PyObject *new_message(PyTypeObject *type, PyObject **fields) {
    bool whole = true;
    for (int i = 0; i < 8; i++)
        whole = whole && fields[i] != NULL;
#if PY_VERSION_HEX < 0x030E0000
    PyObject *message = whole ? type->tp_alloc(type, 8) : NULL;
    for (int i = 0; i < 8; i++)
        if (message != NULL)
            PyTuple_SET_ITEM(message, i, fields[i]);
        else
            Py_XDECREF(fields[i]);
#else /* since 3.14 a tuple caches its hash, which only its constructor initializes */
    PyObject *plain = whole ? PyTuple_New(8) : NULL, *arguments = NULL, *message = NULL;
    for (int i = 0; i < 8; i++)
        if (plain != NULL)
            PyTuple_SET_ITEM(plain, i, fields[i]);
        else
            Py_XDECREF(fields[i]);
    if (plain != NULL && (arguments = PyTuple_Pack(1, plain)) != NULL)
        message = PyTuple_Type.tp_new(type, arguments, NULL);
    Py_XDECREF(arguments);
    Py_XDECREF(plain);
#endif
    return message;
}

/* Create the message of a slot. The caller checks whether it was overwritten meanwhile. */
static PyObject *make_message(Reader *self, const penstock_slot *slot, bool in_place) {
    const uint8_t *from = penstock_bytes(&self->ring, slot);
    const char *block = (const char *)from;
    PyObject *stream = Py_NewRef(self->stream), *attributes = Py_NewRef(Py_None), *payload;
    if (in_place) {
        Py_ssize_t start = from + slot->block - (uint8_t *)self->mapped.memory.buf;
        payload = PySequence_GetSlice(self->view, start, start + (Py_ssize_t)slot->length);
    } else if ((payload = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)slot->length)) != NULL) {
        copy_payload(PyBytes_AS_STRING(payload), from + slot->block, slot->length);
    }
    if (slot->flags & PENSTOCK_HAS_STREAM) {
        Py_SETREF(stream, PyObject_CallFunction(stream_id_type, "y#", block, (Py_ssize_t)16));
        block += 16;
    }
    if (slot->flags & PENSTOCK_HAS_ATTRIBUTES)
        Py_SETREF(attributes, PyBytes_FromStringAndSize(block, slot->attributes));
    PyObject *fields[8] = {PyLong_FromUnsignedLongLong(slot->seq), PyLong_FromLongLong(slot->time_ns),
                           PyLong_FromLongLong(slot->created_ns),  PyLong_FromLong(slot->type),
                           PyLong_FromLong(slot->subtype),         stream,
                           attributes,                             payload};
    bool is_copy = slot->flags & PENSTOCK_HAS_ORIGIN;
    PyObject *message = new_message((PyTypeObject *)(is_copy ? copied_type : message_type), fields);
    if (message != NULL && is_copy) {
        PyObject *origin = PyLong_FromLongLong(penstock_origin(slot, from));
        if (origin == NULL || PyObject_SetAttrString(message, "origin_ns", origin) != 0)
            Py_CLEAR(message);
        Py_XDECREF(origin);
    }
    if (message != NULL && !in_place)
        PyObject_GC_UnTrack(message); /* it is in no cycle, and there may be millions */
    return message;
}

/* Ask Python where to resume after messages from `first` up to `oldest` were overwritten. */
static int lapped(Reader *self, uint64_t first, uint64_t oldest, uint64_t *resume) {
    PyObject *where = PyObject_CallMethod((PyObject *)self, "_lapped", "KK", first, oldest);
    *resume = where == NULL ? 0 : PyLong_AsUnsignedLongLong(where);
    Py_XDECREF(where);
    self->head = penstock_head(&self->ring);
    return PyErr_Occurred() ? -1 : 0;
}

/* Whether the epoch is still the same; recovery starts another. */
static bool is_renumbered(const Reader *self) {
    return __atomic_load_n(&self->ring.header->epoch, __ATOMIC_RELAXED) != self->epoch;
}

/* Let Python map the position to the new epoch. */
static int renumbered(Reader *self) {
    Py_XDECREF(PyObject_CallMethod((PyObject *)self, "_renumbered", NULL));
    self->head = penstock_head(&self->ring);
    return PyErr_Occurred() ? -1 : 1;
}

/* A damaged message: Python raises, or skips it. */
static int damaged(Reader *self, uint64_t seq, const char *what) {
    if (is_cut(&self->mapped))
        return raise_cut((PyObject *)self), -1;
    Py_XDECREF(PyObject_CallMethod((PyObject *)self, "_damaged", "Ks", seq, what));
    return PyErr_Occurred() ? -1 : 1;
}

/* Copy a run of messages to `list`, up to `limit`. Returns 1; 0 if there is no new message, or, with
 * `later`, if an irregular case comes first, which is left to the next call; -1 with an error set. */
static int take_run(Reader *self, PyObject **list, int *count, int limit, bool in_place, bool later) {
    uint64_t first = self->next, end;
    *count = 0;
    if (first >= self->head && first >= (self->head = penstock_head(&self->ring)))
        return is_renumbered(self) && !later ? renumbered(self) : 0;
    end = self->head - first < (uint64_t)limit ? self->head : first + (uint64_t)limit;
    penstock_slot slots[RUN];
    const char *fault = NULL;
    uint64_t seq = first;
    for (; seq < end; seq++) {
        penstock_slot *slot = &slots[*count];
        penstock_load_slot(slot, &self->ring.slots[seq & self->ring.mask]);
        if (!penstock_slot_is_sane(&self->ring, slot, seq))
            fault = "slot";
        else if (!penstock_crc_holds(&self->ring, slot)) /* before its type is used */
            fault = "crc32c";
        if (fault != NULL)
            break;
        if (self->filters && slot->type != self->type)
            continue;
        if ((list[*count] = make_message(self, slot, in_place)) == NULL)
            goto failed;
        ++*count;
    }
    uint64_t resume = first;
    int kept = 0;
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    uint64_t tail = __atomic_load_n(&self->ring.header->tail, __ATOMIC_RELAXED);
    if (is_renumbered(self) || (later && tail > first)) {
        for (int i = 0; i < *count; i++)
            Py_DECREF(list[i]);
        *count = 0;
        return later ? 0 : renumbered(self);
    }
    if (tail > first) {
        if (lapped(self, first, tail, &resume) != 0)
            goto failed;
        fault = NULL;
    }
    self->next = seq > resume ? seq : resume;
    for (int i = 0; i < *count; i++) {
        if (slots[i].seq < resume) {
            Py_DECREF(list[i]);
            continue;
        }
        slots[kept] = slots[i];
        list[kept++] = list[i];
    }
    *count = kept;
    if (self->filters && seq > resume)
        self->filtered += seq - resume - (uint64_t)kept;
    for (int i = 0; i < kept; i++)
        self->bytes += slots[i].length;
    self->messages += (uint64_t)kept;
    if (fault != NULL && kept == 0)
        return later ? 0 : damaged(self, self->next, fault);
    return 1;
failed:
    for (int i = 0; i < *count; i++)
        Py_DECREF(list[i]);
    *count = 0;
    return -1;
}

/* The next wanted message; NULL without an error: there is none now. */
static PyObject *take_one(Reader *self, bool in_place) {
    PyObject *message;
    int count;
    uint64_t stop = UINT64_MAX; /* the current end: otherwise a filter could run forever */
    while (self->next < stop && take_run(self, &message, &count, 1, in_place, false) > 0) {
        if (count > 0)
            return message;
        stop = stop == UINT64_MAX ? penstock_head(&self->ring) : stop;
    }
    return NULL;
}

/* Append available messages to a list, up to `limit`. */
static int take_all(Reader *self, PyObject *messages, Py_ssize_t limit) {
    PyObject *run[RUN];
    int count, result = 1;
    uint64_t stop = self->head = penstock_head(&self->ring);
    struct {
        uint64_t next, messages, bytes, filtered;
    } before = {0};
    while (result > 0 && self->next < stop && PyList_GET_SIZE(messages) < limit) {
        Py_ssize_t have = PyList_GET_SIZE(messages), left = limit - have;
        if (have == 0)
            before.messages = self->messages, before.bytes = self->bytes, before.filtered = self->filtered;
        result = take_run(self, run, &count, left < RUN ? (int)left : RUN, false, have > 0);
        if (have == 0) /* the start of these: losses before them stay counted */
            before.next = self->next - (uint64_t)count - (self->filtered - before.filtered);
        for (int i = 0; i < count; i++) {
            result = PyList_Append(messages, run[i]) == 0 ? result : -1;
            Py_DECREF(run[i]);
        }
    }
    if (result < 0 && self->messages > before.messages) { /* nothing is returned: read them again later */
        self->next = before.next, self->messages = before.messages;
        self->bytes = before.bytes, self->filtered = before.filtered;
    }
    return result;
}

static bool is_ready(const Reader *self) { return penstock_head(&self->ring) > self->next; }

/* While idle: let Python check for another queue or segment. Returns as wait_for_next; 2: keep
 * waiting. */
static int look_around(Reader *self) {
    PyObject *result = PyObject_CallMethod((PyObject *)self, "_idle", NULL);
    Py_XDECREF(result);
    return result == NULL ? -1 : is_ready(self) ? 1 : result == Py_False ? 0 : 2;
}

/* The same, if the last check in any call is at least `between` nanoseconds ago. */
static int look_if_due(Reader *self, int64_t between) {
    int64_t now = penstock_clock(CLOCK_MONOTONIC_COARSE);
    if (now - self->looked < between)
        return 2;
    self->looked = now;
    return look_around(self);
}

/* Wait for a message: 1 there is one, 0 timeout, -1 an error is set. */
static int wait_for_next(Reader *self, int64_t deadline) {
    int result = 2;
    acknowledge(self); /* also skipped messages: the writer may wait for them */
    if (penstock_state(self->ring.header) != PENSTOCK_LIVE &&
        (result = look_around(self)) != 2)
        return result;
    while (!is_ready(self)) {
        int64_t left = deadline - penstock_clock(CLOCK_MONOTONIC);
        if ((result = look_if_due(self, LOOK)) != 2)
            return result;
        if (left <= 0)
            return 0;
        int error;
        Py_BEGIN_ALLOW_THREADS
        error = penstock_sleep(&self->ring, self->next, left < SLICE ? left : SLICE);
        Py_END_ALLOW_THREADS
        if ((error == EINTR && PyErr_CheckSignals() != 0) || self->mapped.closing || is_cut(&self->mapped))
            return -1;
        if (penstock_state(self->ring.header) != PENSTOCK_LIVE && !is_ready(self) &&
            (result = look_around(self)) != 2)
            return result;
    }
    return 1;
}

/* End a call; raise if another thread closed the reader meanwhile. */
static PyObject *leave(Reader *self, PyObject *result) {
    self->mapped.busy = false;
    if (is_cut(&self->mapped)) {
        Py_CLEAR(result);
        raise_cut((PyObject *)self);
    }
    if (!self->mapped.closing)
        return result;
    Py_XDECREF(result);
    close_now((PyObject *)self);
    return PyErr_Occurred() ? NULL : PyObject_CallMethod((PyObject *)self, "_raise_closed", NULL);
}

static PyObject *take_or_wait(Reader *self, PyObject *timeout, bool in_place) {
    int64_t deadline;
    if (!enter(&self->mapped))
        return NULL;
    acknowledge(self);
    PyObject *message = take_one(self, in_place);
    if (message == NULL && !PyErr_Occurred() && look_if_due(self, LOOK) == 1)
        message = take_one(self, in_place);
    if (message == NULL && !PyErr_Occurred() && parse_timeout(timeout, &deadline))
        while (message == NULL && !PyErr_Occurred() && wait_for_next(self, deadline) > 0)
            message = take_one(self, in_place);
    if (message == NULL && !PyErr_Occurred())
        message = Py_NewRef(Py_None);
    return leave(self, message);
}

static PyObject *reader_read(Reader *self, PyObject *const *args, Py_ssize_t n, PyObject *keywords) {
    static const char *const names[] = {"timeout"};
    PyObject *timeout = NULL;
    if ((n > 0 || keywords != NULL) && !parse_arguments(names, 1, args, n, keywords, &timeout))
        return NULL;
    return take_or_wait(self, timeout, false);
}

/* The next message, with its payload in place in the queue. */
static PyObject *reader_peek(Reader *self, PyObject *timeout) { return take_or_wait(self, timeout, true); }

static PyObject *reader_take(Reader *self, PyObject *argument) {
    Py_ssize_t limit = PyLong_AsSsize_t(argument);
    if ((limit == -1 && PyErr_Occurred()) || !enter(&self->mapped))
        return NULL;
    acknowledge(self);
    PyObject *messages = PyList_New(0);
    if (messages != NULL && take_all(self, messages, limit) < 0)
        Py_CLEAR(messages);
    if (messages != NULL && PyList_GET_SIZE(messages) == 0 && look_if_due(self, LOOK) == 1 &&
        take_all(self, messages, limit) < 0)
        Py_CLEAR(messages);
    if (PyErr_Occurred())
        Py_CLEAR(messages);
    if (messages != NULL && PyList_GET_SIZE(messages) == 0)
        acknowledge(self); /* also skipped messages: the writer may wait for them */
    return leave(self, messages);
}

/* _take_more(limit): more available messages, after some that are not returned to the caller yet. So
 * it neither acknowledges those, nor switches to another queue. */
static PyObject *reader_take_more(Reader *self, PyObject *argument) {
    Py_ssize_t limit = PyLong_AsSsize_t(argument);
    if ((limit == -1 && PyErr_Occurred()) || !enter(&self->mapped))
        return NULL;
    PyObject *messages = PyList_New(0);
    if (messages != NULL && take_all(self, messages, limit) < 0)
        Py_CLEAR(messages);
    return leave(self, messages);
}

/* Wait for the next message; False: timeout. */
static PyObject *reader_wait(Reader *self, PyObject *timeout) {
    int64_t deadline;
    if (!parse_timeout(timeout, &deadline) || !enter(&self->mapped))
        return NULL;
    acknowledge(self);
    int ready = is_ready(self) ? 1 : wait_for_next(self, deadline);
    return leave(self, PyErr_Occurred() ? NULL : PyBool_FromLong(ready > 0));
}

/* _look_if_due(seconds): check for another queue, if the last check is at least that long ago. */
static PyObject *reader_look_if_due(Reader *self, PyObject *seconds) {
    double between = PyFloat_AsDouble(seconds);
    if (PyErr_Occurred() || !enter(&self->mapped))
        return NULL;
    int result = is_ready(self) ? 1 : look_if_due(self, (int64_t)(between * 1e9));
    return leave(self, result < 0 ? NULL : Py_NewRef(Py_None));
}

/* _columns(first, limit, most_bytes, out): numbers of up to `limit` messages from `first` on, column after
 * column: seq, time_ns, created_ns (64 bits), type, subtype, offsets of the payloads (32 bits,
 * one more). Returns the count of valid messages, their payload bytes, and the union of their flags. */
static PyObject *reader_columns(Reader *self, PyObject *args) {
    unsigned long long first, limit, most;
    Py_buffer out;
    if (!PyArg_ParseTuple(args, "KKKw*", &first, &limit, &most, &out))
        return NULL;
    uint64_t count = 0, bytes = 0, blocks = 0;
    uint32_t flags = 0;
    if (limit < 1ull << 56 && (uint64_t)out.len >= limit * 36 + 4 && enter(&self->mapped)) {
        int64_t *seq = out.buf, *time = seq + limit, *created = time + limit;
        int32_t *type = (int32_t *)(created + limit), *subtype = type + limit, *offset = subtype + limit;
        for (offset[0] = 0; count < limit; count++) {
            penstock_slot slot;
            penstock_load_slot(&slot, &self->ring.slots[(first + count) & self->ring.mask]);
            if (!penstock_slot_is_sane(&self->ring, &slot, first + count) || bytes + slot.length > most ||
                (blocks += slot.block) > most)
                break;
            seq[count] = (int64_t)slot.seq, time[count] = slot.time_ns, created[count] = slot.created_ns;
            type[count] = slot.type, subtype[count] = slot.subtype;
            offset[count + 1] = (int32_t)(bytes += slot.length);
            flags |= slot.flags;
        }
        self->mapped.busy = false;
    }
    PyBuffer_Release(&out);
    return PyErr_Occurred() ? NULL : Py_BuildValue("KKI", count, bytes, flags);
}

/* _payloads(first, count, out): copy payloads, or only check (`out` is empty); returns the first bad one. */
static PyObject *reader_payloads(Reader *self, PyObject *args) {
    unsigned long long first, count;
    Py_buffer out;
    if (!PyArg_ParseTuple(args, "KKw*", &first, &count, &out))
        return NULL;
    if (!enter(&self->mapped))
        return PyBuffer_Release(&out), NULL;
    uint64_t end = first + count, bad;
    Py_BEGIN_ALLOW_THREADS
    bad = penstock_copy_run(&self->ring, first, end, out.len > 0 ? out.buf : NULL, (uint64_t)out.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&out);
    return leave(self, bad == end ? Py_NewRef(Py_None) : PyLong_FromUnsignedLongLong(bad));
}

/* _attach(mapping, entry, holds, type or None, stream or None, the mapping as a read-only view) */
static PyObject *reader_attach(Reader *self, PyObject *args) {
    PyObject *mapping, *type, *stream, *view;
    int entry, holds;
    int64_t number = 0;
    penstock_ring ring;
    if (!PyArg_ParseTuple(args, "OipOOO", &mapping, &entry, &holds, &type, &stream, &view) ||
        !int_argument(type, "type", INT32_MIN, INT32_MAX, &number))
        return NULL;
    Mapped old = self->mapped; /* a recreated queue replaces it */
    if (!map_buffer(&self->mapped, mapping, &ring)) {
        self->mapped = old;
        return NULL;
    }
    if (old.memory.obj != NULL)
        PyBuffer_Release(&old.memory);
    self->ring = ring;
    self->entry = ring.writable && entry < (int)ring.header->readers ? entry : -1;
    self->holds = holds;
    self->name_crc = self->entry < 0 ? 0 : penstock_name_crc(&ring.readers[self->entry]);
    self->filters = type != Py_None;
    self->type = (int32_t)number;
    self->head = self->next = self->acknowledged = 0;
    self->epoch = ring.header->epoch;
    Py_XSETREF(self->view, Py_NewRef(view));
    Py_XSETREF(self->stream, Py_NewRef(stream));
    Py_RETURN_NONE;
}

/* Detach. False: a thread is reading; it will leave and close. */
static PyObject *reader_detach(Reader *self, PyObject *Py_UNUSED(ignored)) {
    self->mapped.closing = true;
    if (self->mapped.busy) {
        if (self->ring.writable) {
            self->ring.header->sleeping = 1;
            penstock_wake(&self->ring.header->sleeping, &self->ring.header->wakes);
        }
        Py_RETURN_FALSE;
    }
    if (self->mapped.memory.obj != NULL)
        PyBuffer_Release(&self->mapped.memory);
    Py_CLEAR(self->view);
    Py_CLEAR(self->stream);
    Py_RETURN_TRUE;
}

static PyObject *reader_acknowledge(Reader *self, PyObject *Py_UNUSED(ignored)) {
    if (!enter(&self->mapped))
        return NULL;
    acknowledge(self);
    return leave(self, Py_NewRef(Py_None));
}

/* The number of the oldest message, or (`head`) of the next one. */
static PyObject *reader_end(Reader *self, void *head) {
    if (self->mapped.memory.obj == NULL)
        return PyLong_FromLong(0);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return PyLong_FromUnsignedLongLong(head != NULL ? penstock_head(&self->ring) : penstock_tail(&self->ring));
}

static void reader_dealloc(Reader *self) {
    Py_XDECREF(reader_detach(self, NULL));
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef reader_methods[] = {METHOD("read", reader_read, METH_FASTCALL | METH_KEYWORDS),
                                       METHOD("acknowledge", reader_acknowledge, METH_NOARGS),
                                       METHOD("_take", reader_take, METH_O), METHOD("_peek", reader_peek, METH_O),
                                       METHOD("_take_more", reader_take_more, METH_O),
                                       METHOD("_wait", reader_wait, METH_O),
                                       METHOD("_look_if_due", reader_look_if_due, METH_O),
                                       METHOD("_columns", reader_columns, METH_VARARGS),
                                       METHOD("_payloads", reader_payloads, METH_VARARGS),
                                       METHOD("_attach", reader_attach, METH_VARARGS),
                                       METHOD("_detach", reader_detach, METH_NOARGS),
                                       {0}};

static PyGetSetDef reader_getset[] = {{"_head", (getter)reader_end, NULL, NULL, "head"},
                                      {"_oldest", (getter)reader_end, NULL, NULL, NULL},
                                      {0}};

static PyMemberDef reader_members[] = {NUMBER("_next", Reader, next), NUMBER("_messages", Reader, messages),
                                       NUMBER("_bytes", Reader, bytes), NUMBER("_filtered", Reader, filtered),
                                       NUMBER("_numbers_of", Reader, epoch),
                                       {"_entry", T_INT, offsetof(Reader, entry), 0, NULL},
                                       {0}};

static PyTypeObject reader_type =
    TYPE("RingReader", Reader, .tp_dealloc = (destructor)reader_dealloc, .tp_methods = reader_methods,
         .tp_members = reader_members, .tp_getset = reader_getset);

/* wait_for_any(readers, bell, timeout): sleep until one of up to 127 readers may have a message, the
 * bell (a writable buffer of 4 bytes) is not 0, or a second has passed. False: the timeout is over. */
static PyObject *wait_for_any(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *readers, *timeout;
    Py_buffer bell;
    int64_t deadline;
    if (!PyArg_ParseTuple(args, "O!w*O", &PyTuple_Type, &readers, &bell, &timeout))
        return NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(readers);
    bool valid = bell.len == 4 && count < PENSTOCK_SLEEP_MAX && parse_timeout(timeout, &deadline);
    int error = 0;
    penstock_sleeper sleeper;
    penstock_sleeper_init(&sleeper, bell.buf);
    for (Py_ssize_t i = 0; valid && i < count; i++) {
        Reader *reader = (Reader *)PyTuple_GET_ITEM(readers, i);
        valid = PyObject_TypeCheck(reader, &reader_type) && reader->mapped.memory.obj != NULL;
        if (valid)
            penstock_sleeper_add(&sleeper, &reader->ring, reader->next);
    }
    if (valid) {
        int64_t slice = penstock_clock(CLOCK_MONOTONIC) + SLICE, end = deadline < slice ? deadline : slice;
        Py_BEGIN_ALLOW_THREADS
        error = penstock_sleeper_sleep(&sleeper, end);
        Py_END_ALLOW_THREADS
        error = error == ETIMEDOUT && deadline > end ? 0 : error;
    }
    PyBuffer_Release(&bell);
    if (!valid && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "up to 127 open readers, and a bell of 4 bytes");
    if (!valid || (error == EINTR && PyErr_CheckSignals() != 0))
        return NULL;
    if (error != 0 && error != EINTR && error != ETIMEDOUT)
        return errno = error, PyErr_SetFromErrno(PyExc_OSError);
    return PyBool_FromLong(error != ETIMEDOUT);
}

/* wake(memory, offset): increment the word there, and wake all sleepers on it. */
static PyObject *wake(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer memory;
    Py_ssize_t offset;
    if (!PyArg_ParseTuple(args, "w*n", &memory, &offset))
        return NULL;
    uint32_t *word = (uint32_t *)(void *)((char *)memory.buf + offset);
    if (offset >= 0 && offset % 4 == 0 && offset <= memory.len - 4) {
        __atomic_add_fetch(word, 1, __ATOMIC_SEQ_CST);
        syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    }
    PyBuffer_Release(&memory);
    Py_RETURN_NONE;
}

/* crc32c(data, portable=False): by the processor's instruction, or portable. */
static PyObject *crc32c(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer data;
    int portable = 0;
    if (!PyArg_ParseTuple(args, "y*|p", &data, &portable))
        return NULL;
    uint32_t crc = portable ? ~penstock_crc_portable(~0u, data.buf, (size_t)data.len)
                            : penstock_crc32c(0, data.buf, (size_t)data.len);
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLong(crc);
}

static PyMethodDef functions[] = {METHOD("wait_for_any", wait_for_any, METH_VARARGS),
                                  METHOD("wake", wake, METH_VARARGS),
                                  METHOD("crc32c", crc32c, METH_VARARGS),
                                  METHOD("watch", watch, METH_O),
                                  METHOD("unwatch", unwatch, METH_O),
                                  {0}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_ring", NULL, -1, functions, NULL, NULL, NULL, NULL};

static PyObject *imported(const char *module_name, const char *name) {
    PyObject *from = PyImport_ImportModule(module_name);
    PyObject *object = from == NULL ? NULL : PyObject_GetAttrString(from, name);
    Py_XDECREF(from);
    return object;
}

PyMODINIT_FUNC PyInit__ring(void) {
    message_type = imported("penstock.core.message", "Message");
    copied_type = imported("penstock.core.message", "CopiedMessage");
    stream_id_type = imported("penstock.core.stream_id", "StreamId");
    if (message_type == NULL || copied_type == NULL || stream_id_type == NULL || PyType_Ready(&writer_type) != 0 ||
        PyType_Ready(&reader_type) != 0)
        return NULL;
    PyObject *m = PyModule_Create(&module);
    if (m == NULL || PyModule_AddIntConstant(m, "DAMAGED", PENSTOCK_DAMAGED) != 0 ||
        PyModule_AddIntConstant(m, "TOO_LARGE", PENSTOCK_TOO_LARGE) != 0 ||
        PyModule_AddIntConstant(m, "FULL", PENSTOCK_FULL) != 0 ||
        PyModule_AddIntConstant(m, "CHANGED", PENSTOCK_CHANGED) != 0 ||
        PyModule_AddIntConstant(m, "NO_SPACE", PENSTOCK_NO_SPACE) != 0 ||
        PyModule_AddIntConstant(m, "CLOSED", PENSTOCK_CLOSED) != 0 ||
        PyModule_AddIntConstant(m, "GUARDED", PENSTOCK_GUARDED) != 0 ||
        PyModule_AddObjectRef(m, "RingWriter", (PyObject *)&writer_type) != 0 ||
        PyModule_AddObjectRef(m, "RingReader", (PyObject *)&reader_type) != 0)
        Py_CLEAR(m);
    return m;
}
