/* How do messages get into and out of a wide queue at the speed of memory?
 *
 * The ring itself is in include/penstock/ring.h. This file gives it to Python: the bases of the
 * reader and the writer, with the regular case of every call in C. Whatever is irregular - a held
 * reader to wait for, disk space to get, messages that were lost - calls a method of the Python
 * class, which decides, and the call goes on.
 */
#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>
#include <structmember.h>

#ifdef PENSTOCK_FAULTS /* the test build: die at the point of that number */
#include <signal.h>
#include <stdlib.h>
static long fault_points;
static void fault_point(void)
{
    if (fault_points > 0 && --fault_points == 0)
        kill(getpid(), SIGKILL);
}
#define PENSTOCK_FAULT_POINT() fault_point()
#endif
#include <penstock/ring.h>

#define SECOND 1000000000ll
/* From this size on the interpreter is left to others while bytes are copied. */
enum { LARGE = 256 << 10 };
/* Messages that are copied before a reader looks whether it was overtaken. */
enum { RUN = 64 };
/* How long to look again and again before sleeping: about what falling asleep costs. */
enum { SPIN_NS = 20000 };
/* A writer that was killed wakes nobody: look again this often. */
#define SLICE SECOND

static PyObject *message_type, *stream_id_type;

static int64_t clock_ns(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (int64_t)now.tv_sec * SECOND + now.tv_nsec;
}

/* Copy a payload. Large ones let other threads of the interpreter work meanwhile. */
static void copy_payload(void *to, const void *from, uint64_t n)
{
#ifdef PENSTOCK_FAULTS /* half of a payload is a state, too */
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

/* A deadline for what callers give as a timeout: None is for ever. False: an error is set. */
static bool parse_timeout(PyObject *timeout, int64_t *deadline)
{
    *deadline = INT64_MAX;
    if (timeout == NULL || timeout == Py_None)
        return true;
    double seconds = PyFloat_AsDouble(timeout);
    if (seconds == -1.0 && PyErr_Occurred())
        return false;
    if (!(seconds > 0))
        *deadline = 0;
    else if (seconds < 1e9)
        *deadline = clock_ns(CLOCK_MONOTONIC) + (int64_t)(seconds * 1e9);
    return true;
}

/* Sort positional and named arguments into their places; those left out stay NULL. */
static bool parse_arguments(const char *const *names, Py_ssize_t count, PyObject *const *args,
                            Py_ssize_t given, PyObject *keywords, PyObject **out)
{
    if (given > count) {
        PyErr_Format(PyExc_TypeError, "takes %zd arguments, %zd were given", count, given);
        return false;
    }
    for (Py_ssize_t i = 0; i < count; i++)
        out[i] = i < given ? args[i] : NULL;
    for (Py_ssize_t k = 0; keywords != NULL && k < PyTuple_GET_SIZE(keywords); k++) {
        PyObject *name = PyTuple_GET_ITEM(keywords, k);
        Py_ssize_t i = 0;
        while (i < count && PyUnicode_CompareWithASCIIString(name, names[i]) != 0)
            i++;
        if (i == count || out[i] != NULL) {
            PyErr_Format(PyExc_TypeError, i == count ? "there is no argument %R" : "%R was given twice",
                         name);
            return false;
        }
        out[i] = args[given + k];
    }
    if (out[0] == NULL)
        PyErr_Format(PyExc_TypeError, "%s is missing", names[0]);
    return out[0] != NULL;
}

/* A number that is given, and fits. */
static bool int_argument(PyObject *value, const char *name, int64_t least, int64_t most, int64_t *out)
{
    if (value == NULL || value == Py_None)
        return true;
    int overflow;
    long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (number == -1 && PyErr_Occurred())
        return false;
    if (overflow != 0 || number < least || number > most) {
        PyErr_Format(PyExc_OverflowError, "%s does not fit in %d bits", name, most == INT32_MAX ? 32 : 64);
        return false;
    }
    *out = number;
    return true;
}

/* The part that readers and writers share: the mapped memory. */
typedef struct {
    PyObject_HEAD
    Py_buffer memory; /* .obj is NULL when closed */
    bool busy;        /* a thread is in here, maybe without the interpreter's lock */
    bool closing;     /* it shall leave */
} Mapped;

static bool map_buffer(Mapped *self, PyObject *mapping, penstock_ring *ring)
{
    bool writable = true;
    if (PyObject_GetBuffer(mapping, &self->memory, PyBUF_WRITABLE) != 0) {
        PyErr_Clear();
        writable = false;
        if (PyObject_GetBuffer(mapping, &self->memory, PyBUF_SIMPLE) != 0)
            return false;
    }
    const char *fault = penstock_header_fault(self->memory.buf, (uint64_t)self->memory.len);
    if (fault != NULL) {
        PyBuffer_Release(&self->memory);
        PyErr_Format(PyExc_ValueError, "the queue's %s is not right", fault);
        return false;
    }
    *ring = penstock_over(self->memory.buf, writable);
    self->closing = false;
    return true;
}

/* Begin a call; false with an error set: it was closed, or another thread is in here. */
static bool enter(Mapped *self)
{
    if (self->memory.obj == NULL || self->closing) {
        Py_XDECREF(PyObject_CallMethod((PyObject *)self, "_raise_closed", NULL));
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "it is closed");
        return false;
    }
    if (self->busy) {
        PyErr_SetString(PyExc_RuntimeError, "readers and writers are not safe to share between threads");
        return false;
    }
    self->busy = true;
    return true;
}

/* --- the writer ------------------------------------------------------------------------------ */

typedef struct {
    Mapped mapped;
    penstock_writer w;
    int64_t lock_timeout;
    bool sync_each, locked, reserved;
    penstock_slot pending; /* of the reservation */
    uint64_t messages, bytes, refused;
} Writer;

/* A message on its way in. */
typedef struct {
    penstock_slot slot;
    const uint8_t *stream, *attributes, *payload;
    const uint8_t *block; /* stream and attributes as they are stored, or NULL */
} Entry;

static int hook(Writer *self, const char *name, long code, uint64_t bytes)
{
    PyObject *result = PyObject_CallMethod((PyObject *)self, name, "lK", code, (unsigned long long)bytes);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

/* Take the lock of many writers. */
static int take_lock(Writer *self)
{
    if (self->w.number == 0 || self->locked)
        return 0;
    int error = penstock_lock(&self->w, 0);
    int64_t deadline = error == 0 ? 0 : clock_ns(CLOCK_MONOTONIC) + self->lock_timeout;
    while (error != 0) {
        int64_t left = deadline - clock_ns(CLOCK_MONOTONIC);
        if ((error == EINTR && PyErr_CheckSignals() != 0) ||
            (left <= 0 && hook(self, "_lock_timed_out", 0, 0) != 0))
            return -1;
        Py_BEGIN_ALLOW_THREADS
        error = penstock_lock(&self->w, left < SLICE ? left : SLICE);
        Py_END_ALLOW_THREADS
    }
    self->locked = true;
    return penstock_resume(&self->w) ? 0 : hook(self, "_make_room", PENSTOCK_DAMAGED, 0);
}

static void give_lock(Writer *self)
{
    if (self->locked && !self->reserved) {
        self->locked = false;
        penstock_unlock(&self->w);
    }
}

static bool writer_enter(Writer *self)
{
    if (!enter(&self->mapped))
        return false;
    if (self->reserved)
        PyErr_SetString(PyExc_RuntimeError, "a reservation is under way: commit or abort it first");
    else if (take_lock(self) == 0)
        return true;
    give_lock(self);
    self->mapped.busy = false;
    return false;
}

/* Free a place for a message, put its block there, and return where its payload goes. Python
 * makes room where there is none. NULL: an error is set. */
static uint8_t *begin(Writer *self, const Entry *e)
{
    const penstock_slot *slot = &e->slot;
    uint8_t *to;
    penstock_code code;
    while ((code = penstock_begin(&self->w, slot->block + slot->length, &to)) != PENSTOCK_OK) {
        penstock_publish(&self->w); /* so that readers can move on */
        if (hook(self, "_make_room", code, slot->block + slot->length) != 0)
            return NULL;
    }
    PENSTOCK_FAULT_POINT();
    if (e->block != NULL) {
        memcpy(to, e->block, slot->block);
    } else if (slot->block > 0) {
        memset(to + slot->block - 8, 0, 8); /* the bytes that fill it up */
        if (e->stream != NULL)
            memcpy(to, e->stream, 16);
        PENSTOCK_FAULT_POINT();
        if (slot->attributes > 0)
            memcpy(to + (e->stream == NULL ? 0 : 16), e->attributes, slot->attributes);
    }
    return to + slot->block;
}

/* Place one message, and leave it to the caller to publish it. */
static int append(Writer *self, Entry *e)
{
    uint8_t *to = begin(self, e);
    if (to == NULL)
        return -1;
    PENSTOCK_FAULT_POINT();
    copy_payload(to, e->payload, e->slot.length);
    penstock_finish(&self->w, &e->slot);
    self->bytes += e->slot.length;
    return 0;
}

/* End a call that offered messages: publish, count, sync. Returns the last number, or NULL. */
static PyObject *conclude(Writer *self, int failed, uint64_t offered, uint64_t done)
{
    penstock_publish(&self->w);
    uint64_t last = self->w.head - 1;
    give_lock(self);
    self->messages += done;
    self->refused += offered - done;
    self->mapped.busy = false;
    if (done > 0 && self->sync_each) {
        PyObject *kind, *value, *trace;
        PyErr_Fetch(&kind, &value, &trace);
        failed |= hook(self, "_sync", 0, 0);
        if (kind != NULL)
            PyErr_Restore(kind, value, trace);
    }
    return failed ? NULL : PyLong_FromUnsignedLongLong(last);
}

/* The header fields of a message, from arguments type .. attributes. */
static bool parse_header(PyObject **given, Entry *e)
{
    int64_t type = 0, subtype = 0;
    PyObject *stream = given[4], *attributes = given[5];
    e->slot.time_ns = e->slot.created_ns = clock_ns(CLOCK_REALTIME);
    if (!int_argument(given[0], "type", INT32_MIN, INT32_MAX, &type) ||
        !int_argument(given[1], "subtype", INT32_MIN, INT32_MAX, &subtype) ||
        !int_argument(given[2], "time_ns", INT64_MIN, INT64_MAX, &e->slot.time_ns) ||
        !int_argument(given[3], "created_ns", INT64_MIN, INT64_MAX, &e->slot.created_ns))
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
    return true;
}

/* Append one payload. The fast case, bytes, needs no buffer. */
static int offer(Writer *self, PyObject *payload, Entry *e)
{
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

static const char *const write_names[] = {"payload",    "type",   "subtype",   "time_ns",
                                          "created_ns", "stream", "attributes"};

static PyObject *writer_write(Writer *self, PyObject *const *args, Py_ssize_t n, PyObject *keywords)
{
    PyObject *given[7];
    Entry e = {0};
    if (!parse_arguments(write_names, 7, args, n, keywords, given))
        return NULL;
    if (!parse_header(given + 1, &e) || !writer_enter(self)) {
        self->refused++;
        return NULL;
    }
    int failed = offer(self, given[0], &e);
    return conclude(self, failed, 1, failed ? 0 : 1);
}

static PyObject *writer_write_many(Writer *self, PyObject *const *args, Py_ssize_t n, PyObject *keywords)
{
    static const char *const names[] = {"payloads", "type", "subtype"};
    PyObject *given[7] = {NULL};
    Entry e = {0};
    if (!parse_arguments(names, 3, args, n, keywords, given))
        return NULL;
    PyObject *items = PySequence_Fast(given[0], "payloads are many payloads");
    if (items == NULL)
        return NULL;
    uint64_t count = (uint64_t)PySequence_Fast_GET_SIZE(items), done = 0;
    bool ready = count > 0 && parse_header(given + 1, &e) && writer_enter(self);
    int failed = 0;
    /* Its size is asked for each time: a hook may run anything, also what changes the list. */
    while (ready && !failed && done < (uint64_t)PySequence_Fast_GET_SIZE(items)) {
        failed = offer(self, PySequence_Fast_GET_ITEM(items, (Py_ssize_t)done), &e);
        done += failed == 0;
    }
    Py_DECREF(items);
    if (count == 0)
        Py_RETURN_NONE;
    if (ready)
        return conclude(self, failed, count, done);
    self->refused += count;
    return NULL;
}

/* _write_rows(slots, blocks, payloads): append the messages of slots that Python prepared, whose
 * blocks and payloads lie one behind the other. */
static PyObject *writer_write_rows(Writer *self, PyObject *args)
{
    Py_buffer in, blocks, payloads;
    if (!PyArg_ParseTuple(args, "y*y*y*", &in, &blocks, &payloads))
        return NULL;
    uint64_t count = (uint64_t)in.len / sizeof(penstock_slot), done = 0, block = 0, payload = 0;
    bool ready = writer_enter(self);
    int failed = 0;
    for (; ready && done < count; done++) {
        Entry e = {0};
        memcpy(&e.slot, (penstock_slot *)in.buf + done, sizeof e.slot);
        if (e.slot.block > (uint64_t)blocks.len - block || e.slot.length > (uint64_t)payloads.len - payload) {
            PyErr_SetString(PyExc_ValueError, "the rows are longer than their bytes");
            failed = -1;
            break;
        }
        e.block = (uint8_t *)blocks.buf + block;
        e.payload = (uint8_t *)payloads.buf + payload;
        if ((failed = append(self, &e)) != 0)
            break;
        block += e.slot.block;
        payload += e.slot.length;
    }
    PyBuffer_Release(&in);
    PyBuffer_Release(&blocks);
    PyBuffer_Release(&payloads);
    if (ready)
        return conclude(self, failed, count, done);
    self->refused += count;
    return NULL;
}

/* Free a place for a payload of so many bytes, and return where in the mapping it is. */
static PyObject *writer_reserve(Writer *self, PyObject *args)
{
    PyObject *given[6];
    Entry e = {0};
    long long size;
    if (!PyArg_ParseTuple(args, "LOOOOOO", &size, &given[0], &given[1], &given[2], &given[3], &given[4],
                          &given[5]))
        return NULL;
    e.slot.length = (uint64_t)size; /* a negative one is too large */
    if (!parse_header(given, &e) || !writer_enter(self)) {
        self->refused++;
        return NULL;
    }
    uint8_t *to = begin(self, &e);
    if (to == NULL)
        return conclude(self, 1, 1, 0);
    self->pending = e.slot;
    self->reserved = true;
    self->mapped.busy = false;
    return PyLong_FromSsize_t(to - (uint8_t *)self->mapped.memory.buf);
}

/* Publish the reservation with so many of its bytes; -1 gives it up. */
static PyObject *writer_commit(Writer *self, PyObject *argument)
{
    Py_ssize_t length = PyLong_AsSsize_t(argument);
    if ((length == -1 && PyErr_Occurred()) || !enter(&self->mapped))
        return NULL;
    if (!self->reserved || length > (Py_ssize_t)self->pending.length) {
        self->mapped.busy = false;
        PyErr_SetString(PyExc_ValueError, "there is no reservation of that size");
        return NULL;
    }
    self->reserved = false;
    if (length >= 0) {
        self->pending.length = (uint64_t)length;
        penstock_finish(&self->w, &self->pending);
        self->bytes += (uint64_t)length;
        return conclude(self, 0, 1, 1);
    }
    give_lock(self);
    self->mapped.busy = false;
    Py_RETURN_NONE;
}

/* _attach(mapping, fd, lock_timeout_ns, sync_each): an errno, or 0. */
static PyObject *writer_attach(Writer *self, PyObject *args)
{
    PyObject *mapping;
    int fd, sync_each;
    long long lock_timeout;
    penstock_ring ring;
    penstock_writer w;
    if (!PyArg_ParseTuple(args, "OiLp", &mapping, &fd, &lock_timeout, &sync_each))
        return NULL;
    Mapped old = self->mapped; /* a log goes on in its next segment */
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

/* Go on behind the last message; False: the queue is damaged. Many writers do it at every write. */
static PyObject *writer_resume(Writer *self, PyObject *Py_UNUSED(ignored))
{
    return PyBool_FromLong(self->w.number != 0 || penstock_resume(&self->w));
}

/* Let go of the queue. False: a thread is writing. A forked process keeps off its parent's lock. */
static PyObject *writer_detach(Writer *self, PyObject *is_forked)
{
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

/* _wait_for(entries, holders): these rows of the reader table are waited for from now on. */
static PyObject *writer_wait_for(Writer *self, PyObject *args)
{
    PyObject *entries;
    unsigned int holders;
    if (!PyArg_ParseTuple(args, "O!I", &PyTuple_Type, &entries, &holders))
        return NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(entries);
    if (count > (Py_ssize_t)PENSTOCK_HELD_MAX || self->mapped.memory.obj == NULL) {
        PyErr_SetString(PyExc_ValueError, "one writer waits for 128 readers at most");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        unsigned long entry = PyLong_AsUnsignedLong(PyTuple_GET_ITEM(entries, i));
        if (PyErr_Occurred() || entry >= self->w.ring.header->readers) {
            PyErr_SetString(PyExc_ValueError, "there is no such reader");
            return NULL;
        }
        self->w.held[i] = (uint32_t)entry;
    }
    self->w.held_count = (uint32_t)count;
    self->w.holders = holders;
    self->w.holding = true;
    self->w.limit = penstock_held(&self->w);
    Py_RETURN_NONE;
}

/* Sleep until a held reader moved, for so many seconds at most; whether one did. */
static PyObject *writer_sleep_for_room(Writer *self, PyObject *argument)
{
    double seconds = PyFloat_AsDouble(argument);
    if (PyErr_Occurred())
        return NULL;
    int64_t start = clock_ns(CLOCK_MONOTONIC), limit = (int64_t)(seconds * 1e9);
    bool moved = false;
    int error = 0;
    Py_BEGIN_ALLOW_THREADS
    while (!moved && clock_ns(CLOCK_MONOTONIC) - start < SPIN_NS) {
        moved = penstock_held(&self->w) > self->w.limit;
        for (int i = 0; i < 20; i++)
            penstock_pause();
    }
    if (!moved)
        error = penstock_sleep_for_room(&self->w, limit);
    Py_END_ALLOW_THREADS
    if (error == EINTR && PyErr_CheckSignals() != 0)
        return NULL;
    return PyBool_FromLong(penstock_held(&self->w) > self->w.limit);
}

static void writer_dealloc(Writer *self)
{
    Py_XDECREF(writer_detach(self, NULL));
    Py_TYPE(self)->tp_free((PyObject *)self);
}

#define METHOD(name, function, flags) {name, (PyCFunction)(void (*)(void))(function), flags, NULL}

static PyMethodDef writer_methods[] = {
    METHOD("write", writer_write, METH_FASTCALL | METH_KEYWORDS),
    METHOD("write_many", writer_write_many, METH_FASTCALL | METH_KEYWORDS),
    METHOD("_write_rows", writer_write_rows, METH_VARARGS),
    METHOD("_reserve", writer_reserve, METH_VARARGS),
    METHOD("_commit", writer_commit, METH_O),
    METHOD("_attach", writer_attach, METH_VARARGS),
    METHOD("_resume", writer_resume, METH_NOARGS),
    METHOD("_detach", writer_detach, METH_O),
    METHOD("_wait_for", writer_wait_for, METH_VARARGS),
    METHOD("_sleep_for_room", writer_sleep_for_room, METH_O),
    {0}};

static PyMemberDef writer_members[] = {
    {"_messages", T_ULONGLONG, offsetof(Writer, messages), READONLY, NULL},
    {"_bytes", T_ULONGLONG, offsetof(Writer, bytes), 0, NULL},
    {"_refused", T_ULONGLONG, offsetof(Writer, refused), 0, NULL},
    {"_head", T_ULONGLONG, offsetof(Writer, w.head), READONLY, NULL},
    {"_tail", T_ULONGLONG, offsetof(Writer, w.tail), READONLY, NULL},
    {"_position", T_ULONGLONG, offsetof(Writer, w.position), READONLY, NULL},
    {"_limit", T_ULONGLONG, offsetof(Writer, w.limit), 0, NULL},
    {"_ready_position", T_ULONGLONG, offsetof(Writer, w.ready_position), 0, NULL},
    {"_created_ns", T_LONGLONG, offsetof(Writer, w.created_ns), 0, NULL},
    {"_ready_seq", T_ULONGLONG, offsetof(Writer, w.ready_seq), 0, NULL},
    {0}};

static PyTypeObject writer_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "penstock.queue.wide._ring.RingWriter",
    .tp_basicsize = sizeof(Writer),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_new = PyType_GenericNew,
    .tp_dealloc = (destructor)writer_dealloc,
    .tp_methods = writer_methods,
    .tp_members = writer_members,
};

/* --- the reader ------------------------------------------------------------------------------ */

typedef struct {
    Mapped mapped;
    penstock_ring ring;
    PyObject *stream;     /* of the queue, or None */
    PyObject *view;       /* the mapping, read-only, for messages in place */
    int entry;            /* row of the reader table, or -1 */
    bool holds;           /* the writer waits for it */
    bool filters;         /* only messages of `type` are wanted */
    int32_t type;
    uint64_t next;         /* number of the message to read next */
    uint64_t head;         /* as last seen; saves a look at what the writer changes all the time */
    uint64_t acknowledged; /* as in the table */
    uint64_t messages, bytes, filtered;
} Reader;

/* Tell the table how far this reader is. Everything that was returned before this call is done. */
static void acknowledge(Reader *self)
{
    if (self->entry < 0 || self->acknowledged == self->next)
        return;
    self->acknowledged = self->next;
    if (self->holds)
        penstock_acknowledge(&self->ring, (uint32_t)self->entry, self->next);
    else
        __atomic_store_n(&self->ring.readers[self->entry].position, self->next, __ATOMIC_RELAXED);
}

/* Make the message of a slot, which may be overwritten meanwhile: the caller finds out. */
static PyObject *make_message(Reader *self, const penstock_slot *slot, bool in_place)
{
    const uint8_t *from = penstock_bytes(&self->ring, slot);
    PyObject *stream = NULL, *attributes = NULL, *payload;
    if (in_place) {
        Py_ssize_t start = from + slot->block - (uint8_t *)self->mapped.memory.buf;
        payload = PySequence_GetSlice(self->view, start, start + (Py_ssize_t)slot->length);
    } else {
        payload = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)slot->length);
    }
    if (payload == NULL)
        return NULL;
    if (!in_place)
        copy_payload(PyBytes_AS_STRING(payload), from + slot->block, slot->length);
    if (slot->flags & PENSTOCK_HAS_STREAM) {
        PyObject *bytes = PyBytes_FromStringAndSize((const char *)from, 16);
        stream = bytes == NULL ? NULL : PyObject_CallOneArg(stream_id_type, bytes);
        Py_XDECREF(bytes);
    } else {
        stream = Py_NewRef(self->stream);
    }
    if (slot->flags & PENSTOCK_HAS_ATTRIBUTES)
        attributes = PyBytes_FromStringAndSize(
            (const char *)from + (slot->flags & PENSTOCK_HAS_STREAM ? 16 : 0), slot->attributes);
    else
        attributes = Py_NewRef(Py_None);
    PyTypeObject *type = (PyTypeObject *)message_type;
    PyObject *message = stream && attributes ? type->tp_alloc(type, 8) : NULL;
    if (message == NULL) {
        Py_XDECREF(stream);
        Py_XDECREF(attributes);
        Py_DECREF(payload);
        return NULL;
    }
    PyObject *fields[8] = {PyLong_FromUnsignedLongLong(slot->seq), PyLong_FromLongLong(slot->time_ns),
                           PyLong_FromLongLong(slot->created_ns),  PyLong_FromLong(slot->type),
                           PyLong_FromLong(slot->subtype),         stream,
                           attributes,                             payload};
    bool whole = true;
    for (int i = 0; i < 8; i++) {
        whole = whole && fields[i] != NULL;
        PyTuple_SET_ITEM(message, i, fields[i]);
    }
    if (!whole)
        Py_CLEAR(message);
    else if (!in_place)
        PyObject_GC_UnTrack(message); /* it is in no cycle, and there are millions of them */
    return message;
}

/* Ask Python where to go on after messages from `next` up to `oldest` were overwritten. */
static int lapped(Reader *self, uint64_t first, uint64_t oldest, uint64_t *resume)
{
    PyObject *where = PyObject_CallMethod((PyObject *)self, "_lapped", "KK", (unsigned long long)first,
                                          (unsigned long long)oldest);
    *resume = where == NULL ? 0 : PyLong_AsUnsignedLongLong(where);
    Py_XDECREF(where);
    if (PyErr_Occurred())
        return -1;
    self->head = penstock_head(&self->ring);
    return 0;
}

/* A message that is there and is not right: Python raises, or steps over it. */
static int damaged(Reader *self, uint64_t seq, const char *what)
{
    PyObject *result =
        PyObject_CallMethod((PyObject *)self, "_damaged", "Ks", (unsigned long long)seq, what);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

/* Copy a run of messages to `list`, up to `limit`. Returns how many of the queue's messages were
 * gone through (0: there is nothing new), or -1. */
static int64_t take_run(Reader *self, PyObject **list, int *count, int limit, bool in_place)
{
    uint64_t first = self->next, end;
    *count = 0;
    if (first >= self->head && first >= (self->head = penstock_head(&self->ring)))
        return 0;
    end = self->head - first < (uint64_t)limit ? self->head : first + (uint64_t)limit;
    penstock_slot slots[RUN];
    const char *fault = NULL;
    uint64_t seq = first;
    for (; seq < end && fault == NULL; seq++) {
        penstock_slot *slot = &slots[*count];
        penstock_load_slot(slot, &self->ring.slots[seq & self->ring.mask]);
        if (!penstock_slot_is_sane(&self->ring, slot, seq)) {
            fault = "slot";
            break;
        }
        if (self->filters && slot->type != self->type)
            continue;
        if (slot->flags & PENSTOCK_HAS_CRC &&
            slot->crc32c != penstock_message_crc(slot, penstock_bytes(&self->ring, slot))) {
            fault = "crc32c";
            break;
        }
        if ((list[*count] = make_message(self, slot, in_place)) == NULL)
            goto failed;
        ++*count;
    }
    uint64_t resume = first, scanned = seq - first;
    int kept = 0;
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    uint64_t tail = __atomic_load_n(&self->ring.header->tail, __ATOMIC_RELAXED);
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
        return damaged(self, self->next, fault) != 0 ? -1 : 1;
    return scanned > 0 || self->next > first ? 1 : 0;
failed:
    for (int i = 0; i < *count; i++)
        Py_DECREF(list[i]);
    *count = 0;
    return -1;
}

/* The next message that is wanted: NULL without an error when there is none now. */
static PyObject *take_one(Reader *self, bool in_place)
{
    PyObject *message;
    int count;
    uint64_t stop = 0; /* where the queue ended when this began: a filter may pass over for ever */
    while (take_run(self, &message, &count, 1, in_place) > 0) {
        if (count > 0)
            return message;
        if (stop == 0)
            stop = penstock_head(&self->ring);
        if (self->next >= stop)
            break;
    }
    return NULL;
}

static int take_all(Reader *self, PyObject *messages, Py_ssize_t limit)
{
    PyObject *run[RUN];
    int count;
    int64_t result;
    uint64_t stop = self->head = penstock_head(&self->ring);
    while (PyList_GET_SIZE(messages) < limit) {
        Py_ssize_t left = limit - PyList_GET_SIZE(messages);
        if ((result = take_run(self, run, &count, left < RUN ? (int)left : RUN, false)) <= 0)
            return (int)result;
        for (int i = 0; i < count; i++) {
            int failed = PyList_Append(messages, run[i]);
            Py_DECREF(run[i]);
            if (failed)
                return -1;
        }
        if (self->next >= stop)
            break;
    }
    return 0;
}

static bool is_ready(const Reader *self) { return penstock_head(&self->ring) > self->next; }

/* While nothing comes: let Python look for another queue, or a next part. As wait_for_next; 2 means
 * to go on waiting. */
static int look_around(Reader *self)
{
    PyObject *result = PyObject_CallMethod((PyObject *)self, "_idle", NULL);
    Py_XDECREF(result);
    return result == NULL ? -1 : is_ready(self) ? 1 : result == Py_False ? 0 : 2;
}

/* Wait for a message: 1 there is one, 0 the time is over, -1 an error is set. */
static int wait_for_next(Reader *self, int64_t deadline)
{
    int result = 2;
    if (__atomic_load_n(&self->ring.header->state, __ATOMIC_RELAXED) != PENSTOCK_LIVE &&
        (result = look_around(self)) != 2)
        return result;
    int64_t now = clock_ns(CLOCK_MONOTONIC), spin = now + SPIN_NS;
    Py_BEGIN_ALLOW_THREADS
    while (!is_ready(self) && now < spin && now < deadline) {
        for (int i = 0; i < 20; i++)
            penstock_pause();
        now = clock_ns(CLOCK_MONOTONIC);
    }
    Py_END_ALLOW_THREADS
    while (!is_ready(self)) {
        int64_t left = deadline - clock_ns(CLOCK_MONOTONIC);
        if (left <= 0)
            return 0;
        int error;
        Py_BEGIN_ALLOW_THREADS
        error = penstock_sleep(&self->ring, self->next, left < SLICE ? left : SLICE);
        Py_END_ALLOW_THREADS
        if ((error == EINTR && PyErr_CheckSignals() != 0) || self->mapped.closing)
            return -1;
        uint32_t state = __atomic_load_n(&self->ring.header->state, __ATOMIC_RELAXED);
        if ((error == ETIMEDOUT || state != PENSTOCK_LIVE) && !is_ready(self) &&
            (result = look_around(self)) != 2)
            return result;
    }
    return 1;
}

/* End a call; one that was closed by another thread meanwhile raises. */
static PyObject *leave(Reader *self, PyObject *result)
{
    self->mapped.busy = false;
    if (self->mapped.closing) {
        Py_XDECREF(result);
        PyErr_Clear();
        Py_XDECREF(PyObject_CallMethod((PyObject *)self, "close", NULL));
        if (!PyErr_Occurred())
            Py_XDECREF(PyObject_CallMethod((PyObject *)self, "_raise_closed", NULL));
        return NULL;
    }
    return result;
}

static PyObject *take_or_wait(Reader *self, PyObject *timeout, bool in_place)
{
    int64_t deadline;
    if (!enter(&self->mapped))
        return NULL;
    acknowledge(self);
    PyObject *message = take_one(self, in_place);
    if (message == NULL && !PyErr_Occurred() && parse_timeout(timeout, &deadline)) {
        while (message == NULL && wait_for_next(self, deadline) > 0) {
            message = take_one(self, in_place);
            if (message == NULL && PyErr_Occurred())
                break;
        }
    }
    if (message == NULL && !PyErr_Occurred())
        message = Py_NewRef(Py_None);
    return leave(self, message);
}

static const char *const timeout_name[] = {"timeout"};

static PyObject *reader_read(Reader *self, PyObject *const *args, Py_ssize_t n, PyObject *keywords)
{
    PyObject *timeout = NULL;
    if ((n > 0 || keywords != NULL) && !parse_arguments(timeout_name, 1, args, n, keywords, &timeout))
        return NULL;
    return take_or_wait(self, timeout, false);
}

/* The next message, with its payload where it lies in the queue. */
static PyObject *reader_peek(Reader *self, PyObject *timeout) { return take_or_wait(self, timeout, true); }

static PyObject *reader_take(Reader *self, PyObject *argument)
{
    Py_ssize_t limit = PyLong_AsSsize_t(argument);
    if ((limit == -1 && PyErr_Occurred()) || !enter(&self->mapped))
        return NULL;
    acknowledge(self);
    PyObject *messages = PyList_New(0);
    /* An error behind messages that were taken waits for the next call, which meets it again. */
    if (messages != NULL && take_all(self, messages, limit) != 0 && PyErr_Occurred()) {
        if (PyList_GET_SIZE(messages) > 0)
            PyErr_Clear();
        else
            Py_CLEAR(messages);
    }
    return leave(self, messages);
}

/* Wait for the next message; False when the time is over. */
static PyObject *reader_wait(Reader *self, PyObject *timeout)
{
    int64_t deadline;
    if (!parse_timeout(timeout, &deadline) || !enter(&self->mapped))
        return NULL;
    acknowledge(self);
    int ready = penstock_head(&self->ring) > self->next ? 1 : wait_for_next(self, deadline);
    return leave(self, ready < 0 && PyErr_Occurred() ? NULL : Py_NewRef(ready > 0 ? Py_True : Py_False));
}

/* _gather(slots, out): copy the payloads of these slots one behind the other, unless `out` is empty.
 * Returns the number of the first whose crc32c is not right, or None. */
static PyObject *reader_gather(Reader *self, PyObject *args)
{
    Py_buffer in, out;
    if (!PyArg_ParseTuple(args, "y*w*", &in, &out))
        return NULL;
    PyObject *result = NULL;
    if (enter(&self->mapped)) {
        const penstock_slot *slots = in.buf;
        Py_ssize_t count = in.len / (Py_ssize_t)sizeof(penstock_slot), i, bad = -1;
        uint64_t room = (uint64_t)out.len;
        bool fits = true;
        uint8_t *to = out.buf;
        Py_BEGIN_ALLOW_THREADS
        for (i = 0; i < count && bad < 0 && fits; i++) {
            const penstock_slot *slot = &slots[i];
            const uint8_t *from = penstock_bytes(&self->ring, slot);
            fits = penstock_slot_is_sane(&self->ring, slot, slot->seq) && (slot->length <= room || out.len == 0);
            if (!fits)
                break;
            if (out.len > 0)
                penstock_copy(to, from + slot->block, slot->length);
            if (slot->flags & PENSTOCK_HAS_CRC && slot->crc32c != penstock_message_crc(slot, from))
                bad = i;
            to += slot->length;
            room -= slot->length;
        }
        Py_END_ALLOW_THREADS
        if (!fits)
            PyErr_SetString(PyExc_ValueError, "the payloads do not fit");
        else
            result = bad < 0 ? Py_NewRef(Py_None) : PyLong_FromUnsignedLongLong(slots[bad].seq);
        result = leave(self, result);
    }
    PyBuffer_Release(&in);
    PyBuffer_Release(&out);
    return result;
}

/* _attach(mapping, entry, holds, type or None, stream or None) */
static PyObject *reader_attach(Reader *self, PyObject *args)
{
    PyObject *mapping, *type, *stream;
    int entry, holds;
    penstock_ring ring;
    if (!PyArg_ParseTuple(args, "OipOO", &mapping, &entry, &holds, &type, &stream))
        return NULL;
    int64_t number = 0;
    if (!int_argument(type, "type", INT32_MIN, INT32_MAX, &number))
        return NULL;
    Mapped old = self->mapped; /* a queue that was created anew takes its place */
    if (!map_buffer(&self->mapped, mapping, &ring)) {
        self->mapped = old;
        return NULL;
    }
    PyObject *whole = PyMemoryView_FromObject(mapping);
    PyObject *view = whole == NULL ? NULL : PyObject_CallMethod(whole, "toreadonly", NULL);
    Py_XDECREF(whole);
    if (view == NULL || (entry >= 0 && (!ring.writable || (uint32_t)entry >= ring.header->readers))) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "there is no such row in the reader table");
        Py_XDECREF(view);
        PyBuffer_Release(&self->mapped.memory);
        self->mapped = old;
        return NULL;
    }
    if (old.memory.obj != NULL)
        PyBuffer_Release(&old.memory);
    self->ring = ring;
    self->entry = entry;
    self->holds = holds;
    self->filters = type != Py_None;
    self->type = (int32_t)number;
    self->head = self->next = self->acknowledged = 0;
    Py_XSETREF(self->view, view);
    Py_XSETREF(self->stream, Py_NewRef(stream));
    Py_RETURN_NONE;
}

/* False: a thread is reading; it leaves and closes. */
static PyObject *reader_detach(Reader *self, PyObject *Py_UNUSED(ignored))
{
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

/* Say that everything read so far is done. */
static PyObject *reader_acknowledge(Reader *self, PyObject *Py_UNUSED(ignored))
{
    if (!enter(&self->mapped))
        return NULL;
    acknowledge(self);
    return leave(self, Py_NewRef(Py_None));
}

static PyObject *reader_newest(Reader *self, void *Py_UNUSED(closure))
{
    return self->mapped.memory.obj == NULL ? PyLong_FromLong(0)
                                           : PyLong_FromUnsignedLongLong(penstock_head(&self->ring));
}

static PyObject *reader_oldest(Reader *self, void *Py_UNUSED(closure))
{
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return self->mapped.memory.obj == NULL ? PyLong_FromLong(0)
                                           : PyLong_FromUnsignedLongLong(penstock_tail(&self->ring));
}

static void reader_dealloc(Reader *self)
{
    Py_XDECREF(reader_detach(self, NULL));
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef reader_methods[] = {
    METHOD("read", reader_read, METH_FASTCALL | METH_KEYWORDS),
    METHOD("_take", reader_take, METH_O),
    METHOD("_peek", reader_peek, METH_O),
    METHOD("_wait", reader_wait, METH_O),
    METHOD("_gather", reader_gather, METH_VARARGS),
    METHOD("_attach", reader_attach, METH_VARARGS),
    METHOD("_detach", reader_detach, METH_NOARGS),
    METHOD("acknowledge", reader_acknowledge, METH_NOARGS),
    {0}};

static PyGetSetDef reader_getset[] = {
    {"_head", (getter)reader_newest, NULL, "number of the next message that will come", NULL},
    {"_oldest", (getter)reader_oldest, NULL, "number of the oldest message that is there", NULL},
    {0}};

static PyMemberDef reader_members[] = {
    {"_next", T_ULONGLONG, offsetof(Reader, next), 0, NULL},
    {"_messages", T_ULONGLONG, offsetof(Reader, messages), 0, NULL},
    {"_bytes", T_ULONGLONG, offsetof(Reader, bytes), 0, NULL},
    {"_filtered", T_ULONGLONG, offsetof(Reader, filtered), 0, NULL},
    {"_entry", T_INT, offsetof(Reader, entry), 0, NULL},
    {0}};

static PyTypeObject reader_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "penstock.queue.wide._ring.RingReader",
    .tp_basicsize = sizeof(Reader),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_new = PyType_GenericNew,
    .tp_dealloc = (destructor)reader_dealloc,
    .tp_methods = reader_methods,
    .tp_members = reader_members,
    .tp_getset = reader_getset,
};

/* --- waiting for many ------------------------------------------------------------------------ */

/* futex_waitv of Linux 5.16, which older C libraries have no name for. */
enum { SYS_FUTEX_WAITV = 449, WAITV_MAX = 128, WAITV_32 = 2 };
struct waitv {
    uint64_t value, address;
    uint32_t flags, unused;
};

/* wait_for_any(readers, bell, timeout): sleep until one of up to 127 readers may have a message, the
 * bell (a writable buffer of 4 bytes) rings, or a second is over. False: the time is over. */
static PyObject *wait_for_any(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *readers, *timeout;
    Py_buffer bell;
    int64_t deadline;
    if (!PyArg_ParseTuple(args, "O!w*O", &PyTuple_Type, &readers, &bell, &timeout))
        return NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(readers), waiting = 1;
    bool ready = false, valid = bell.len == 4 && count < WAITV_MAX && parse_timeout(timeout, &deadline);
    struct waitv words[WAITV_MAX] = {
        {__atomic_load_n((uint32_t *)bell.buf, __ATOMIC_SEQ_CST), (uintptr_t)bell.buf, WAITV_32, 0}};
    for (Py_ssize_t i = 0; valid && i < count; i++) {
        Reader *reader = (Reader *)PyTuple_GET_ITEM(readers, i);
        valid = PyObject_TypeCheck(reader, &reader_type) && reader->mapped.memory.obj != NULL;
        if (!valid || !reader->ring.writable)
            continue;
        penstock_header *h = reader->ring.header;
        words[waiting++] = (struct waitv){__atomic_load_n(&h->wakes, __ATOMIC_SEQ_CST),
                                          (uintptr_t)&h->wakes, WAITV_32, 0};
        __atomic_store_n(&h->sleeping, 1, __ATOMIC_SEQ_CST);
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
        ready = ready || penstock_head(&reader->ring) > reader->next;
    }
    int error = 0;
    if (valid && !ready) {
        int64_t slice = clock_ns(CLOCK_MONOTONIC) + SLICE, end = deadline < slice ? deadline : slice;
        struct timespec until = {end / SECOND, end % SECOND};
        Py_BEGIN_ALLOW_THREADS
        if (syscall(SYS_FUTEX_WAITV, words, waiting, 0, &until, CLOCK_MONOTONIC) < 0)
            error = errno == ETIMEDOUT && deadline > end ? EAGAIN : errno;
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&bell);
    if (!valid && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "up to 127 open readers, and a bell of 4 bytes");
    if (!valid || (error == EINTR && PyErr_CheckSignals() != 0))
        return NULL;
    if (error != 0 && error != EAGAIN && error != EINTR && error != ETIMEDOUT)
        return errno = error, PyErr_SetFromErrno(PyExc_OSError);
    return PyBool_FromLong(error != ETIMEDOUT);
}

/* wake(memory, offset): count up the word there, and wake everybody who sleeps on it. */
static PyObject *wake(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer memory;
    Py_ssize_t offset;
    if (!PyArg_ParseTuple(args, "w*n", &memory, &offset))
        return NULL;
    if (offset >= 0 && offset % 4 == 0 && offset <= memory.len - 4) {
        uint32_t *word = (uint32_t *)(void *)((char *)memory.buf + offset);
        __atomic_add_fetch(word, 1, __ATOMIC_SEQ_CST);
        syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    }
    PyBuffer_Release(&memory);
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    METHOD("wait_for_any", wait_for_any, METH_VARARGS), METHOD("wake", wake, METH_VARARGS), {0}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "_ring", .m_size = -1,
                                    .m_methods = functions};

static PyObject *imported(const char *module_name, const char *name)
{
    PyObject *from = PyImport_ImportModule(module_name);
    PyObject *object = from == NULL ? NULL : PyObject_GetAttrString(from, name);
    Py_XDECREF(from);
    return object;
}

PyMODINIT_FUNC PyInit__ring(void)
{
#ifdef PENSTOCK_FAULTS
    const char *at = getenv("PENSTOCK_FAULT_AT");
    fault_points = at == NULL ? 0 : atol(at);
#endif
    message_type = imported("penstock.core.message", "Message");
    stream_id_type = imported("penstock.core.stream_id", "StreamId");
    if (message_type == NULL || stream_id_type == NULL || PyType_Ready(&writer_type) != 0 ||
        PyType_Ready(&reader_type) != 0)
        return NULL;
    PyObject *m = PyModule_Create(&module);
    static const char *const codes[] = {"OK", "EMPTY", "LAPPED", "DAMAGED", "TOO_LARGE", "FULL", "CHANGED",
                                        "NO_SPACE"};
    bool failed = m == NULL;
    for (int code = 0; !failed && code <= PENSTOCK_NO_SPACE; code++)
        failed = PyModule_AddIntConstant(m, codes[code], code) != 0;
    if (failed || PyModule_AddObjectRef(m, "RingWriter", (PyObject *)&writer_type) != 0 ||
        PyModule_AddObjectRef(m, "RingReader", (PyObject *)&reader_type) != 0)
        Py_CLEAR(m);
    return m;
}
