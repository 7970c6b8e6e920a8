/* How do messages get into and out of a wide queue at the speed of memory?
 *
 * The ring itself is in include/penstock/ring.h. This file gives it to Python: the bases of the
 * writer (_writer.h) and the reader (_reader.h), with the regular case of every call in C. Irregular
 * cases - a held reader to wait for, disk space to allocate, messages that were lost - call a method of
 * the Python class, which decides, and the call continues.
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

/* Parts of a Python class. */
#define METHOD(name, function, flags) {name, (PyCFunction)(void (*)(void))(function), flags, NULL}
#define NUMBER(name, kind, field) {name, T_ULONGLONG, offsetof(kind, field), 0, NULL}
#define TYPE(name, kind, ...)                                                                              \
    {PyVarObject_HEAD_INIT(NULL, 0).tp_name = "penstock.queue.wide._ring." name,                          \
     .tp_basicsize = sizeof(kind), .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,                   \
     .tp_new = PyType_GenericNew, __VA_ARGS__}

#include "_writer.h"

#include "_reader.h"

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
