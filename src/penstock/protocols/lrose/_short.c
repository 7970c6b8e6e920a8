/* How is a WRITE of one plain message, the most usual request, made and known at a glance?
 *
 * In C because a round trip makes each of these once, and Python needs as long for all four as the
 * system does for one packet. What the bytes mean is known elsewhere: `fmq_messages` gives a request
 * and a reply that the codec made, and here are only the places of the numbers that change.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

/* Bytes of frames: cookie, id, len, seq_no (docs/specs/lrose.md 2.2); a reply is a DsMessage
 * without parts. */
enum { FRAME_HEADER = 20, REQUEST_SIZE = 164, REPLY_SIZE = 84, ALIGNMENT = 8 };
/* Of both. */
enum { LEN_AT = 12, SEQ_AT = 16 };
/* Of a request, whose parts are an INFO and a DATA (docs/specs/lrose.md 2.5): the len of DATA, its
 * spare, and the numbers of INFO. */
enum { DATA_LEN_AT = 116, TYPE_AT = 132, SUBTYPE_AT = 136, SIZE_AT = 140, COMPRESSED_AT = 144,
       PLAIN_SIZE_AT = 148, TIME_AT = 156 };
/* Of a reply. */
enum { MODE_AT = 28, MODE_END = 32 };

typedef struct {
    PyObject_HEAD
    unsigned char request[REQUEST_SIZE]; /* up to its payload, which is empty */
    unsigned char reply[REPLY_SIZE];
} Forms;

static int32_t get_word(const unsigned char *at)
{
    uint32_t w;
    memcpy(&w, at, sizeof w);
    return (int32_t)__builtin_bswap32(w);
}

static void put_word(unsigned char *at, int32_t value)
{
    uint32_t w = __builtin_bswap32((uint32_t)value);
    memcpy(at, &w, sizeof w);
}

static int read_int32(PyObject *value, int32_t *to)
{
    long long n = PyLong_AsLongLong(value);
    if (n == -1 && PyErr_Occurred())
        return -1;
    if (n < INT32_MIN || n > INT32_MAX) {
        PyErr_Format(PyExc_OverflowError, "%lld does not fit in 32 bits", n);
        return -1;
    }
    *to = (int32_t)n;
    return 0;
}

/* The number of a frame, which wraps: a connection may have more of them. */
static int read_seq(PyObject *value, int32_t *to)
{
    unsigned long n = PyLong_AsUnsignedLongMask(value);
    if (n == (unsigned long)-1 && PyErr_Occurred())
        return -1;
    *to = (int32_t)(uint32_t)n;
    return 0;
}

/* Take the arguments (buffer, size) of a function that looks at a frame. */
static int take_frame(PyObject *const *args, Py_ssize_t nargs, Py_buffer *buffer, Py_ssize_t *size)
{
    if (nargs != 2) {
        PyErr_SetString(PyExc_TypeError, "expected a buffer and the size of what is in it");
        return -1;
    }
    *size = PyLong_AsSsize_t(args[1]);
    if (*size == -1 && PyErr_Occurred())
        return -1;
    if (PyObject_GetBuffer(args[0], buffer, PyBUF_SIMPLE) != 0)
        return -1;
    if (*size >= 0 && *size <= buffer->len)
        return 0;
    PyBuffer_Release(buffer);
    PyErr_SetString(PyExc_IndexError, "the buffer is smaller than what is in it");
    return -1;
}

static PyObject *Forms_encode_write(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    int32_t seq, type, subtype;
    if (nargs != 4 || !PyBytes_Check(args[1]))
        return PyErr_Format(PyExc_TypeError, "encode_write(seq, payload: bytes, type, subtype)");
    if (read_seq(args[0], &seq) != 0 || read_int32(args[2], &type) != 0 ||
        read_int32(args[3], &subtype) != 0)
        return NULL;
    Py_ssize_t size = PyBytes_GET_SIZE(args[1]);
    Py_ssize_t padding = ALIGNMENT - size % ALIGNMENT, whole = REQUEST_SIZE + size + padding;
    if (whole > INT32_MAX)
        return PyErr_Format(PyExc_OverflowError, "%zd bytes do not fit in one request", size);
    PyObject *frame = PyBytes_FromStringAndSize(NULL, whole);
    if (frame == NULL)
        return NULL;
    unsigned char *to = (unsigned char *)PyBytes_AS_STRING(frame);
    memcpy(to, ((Forms *)self)->request, REQUEST_SIZE);
    put_word(to + LEN_AT, (int32_t)whole - FRAME_HEADER);
    put_word(to + SEQ_AT, seq);
    put_word(to + DATA_LEN_AT, (int32_t)size);
    put_word(to + TYPE_AT, type);
    put_word(to + SUBTYPE_AT, subtype);
    put_word(to + SIZE_AT, (int32_t)size);
    put_word(to + PLAIN_SIZE_AT, (int32_t)size);
    memcpy(to + REQUEST_SIZE, PyBytes_AS_STRING(args[1]), (size_t)size);
    memset(to + REQUEST_SIZE + size, 0, (size_t)padding);
    return frame;
}

static PyObject *Forms_find_write(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    const unsigned char *form = ((Forms *)self)->request;
    Py_buffer buffer;
    Py_ssize_t size;
    if (take_frame(args, nargs, &buffer, &size) != 0)
        return NULL;
    const unsigned char *from = buffer.buf;
    PyObject *found = NULL;
    if (size >= REQUEST_SIZE && memcmp(from, form, LEN_AT) == 0 &&
        memcmp(from + FRAME_HEADER, form + FRAME_HEADER, DATA_LEN_AT - FRAME_HEADER) == 0) {
        int32_t length = get_word(from + DATA_LEN_AT);
        if (length >= 0 && length <= size - REQUEST_SIZE && get_word(from + SIZE_AT) == length &&
            get_word(from + LEN_AT) == size - FRAME_HEADER && get_word(from + TIME_AT) == 0 &&
            get_word(from + COMPRESSED_AT) == 0)
            found = Py_BuildValue("iin", get_word(from + TYPE_AT), get_word(from + SUBTYPE_AT),
                                  (Py_ssize_t)REQUEST_SIZE + length);
        else
            found = Py_NewRef(Py_None);
    } else {
        found = Py_NewRef(Py_None);
    }
    PyBuffer_Release(&buffer);
    return found;
}

static PyObject *Forms_encode_written(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    int32_t seq, mode;
    if (nargs != 2)
        return PyErr_Format(PyExc_TypeError, "encode_written(seq, mode)");
    if (read_seq(args[0], &seq) != 0 || read_int32(args[1], &mode) != 0)
        return NULL;
    unsigned char frame[REPLY_SIZE];
    memcpy(frame, ((Forms *)self)->reply, REPLY_SIZE);
    put_word(frame + SEQ_AT, seq);
    put_word(frame + MODE_AT, mode);
    return PyBytes_FromStringAndSize((char *)frame, REPLY_SIZE);
}

static PyObject *Forms_find_written(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    const unsigned char *form = ((Forms *)self)->reply;
    Py_buffer buffer;
    Py_ssize_t size;
    if (take_frame(args, nargs, &buffer, &size) != 0)
        return NULL;
    const unsigned char *from = buffer.buf;
    PyObject *found;
    if (size == REPLY_SIZE && memcmp(from, form, SEQ_AT) == 0 &&
        memcmp(from + FRAME_HEADER, form + FRAME_HEADER, MODE_AT - FRAME_HEADER) == 0 &&
        memcmp(from + MODE_END, form + MODE_END, REPLY_SIZE - MODE_END) == 0)
        found = PyLong_FromLong(get_word(from + MODE_AT));
    else
        found = Py_NewRef(Py_None);
    PyBuffer_Release(&buffer);
    return found;
}

static int Forms_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
    Forms *forms = (Forms *)self;
    const char *request, *reply;
    Py_ssize_t request_size, reply_size;
    static char *names[] = {"request", "reply", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "y#y#", names, &request, &request_size, &reply,
                                     &reply_size))
        return -1;
    if (request_size != REQUEST_SIZE + ALIGNMENT || reply_size != REPLY_SIZE) {
        PyErr_SetString(PyExc_ValueError, "expected a WRITE of an empty message, and its reply");
        return -1;
    }
    memcpy(forms->request, request, REQUEST_SIZE);
    memcpy(forms->reply, reply, REPLY_SIZE);
    return 0;
}

static void Forms_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

#define METHOD(name, text) \
    {#name, (PyCFunction)(void (*)(void))Forms_##name, METH_FASTCALL, text}
static PyMethodDef Forms_methods[] = {
    METHOD(encode_write, "encode_write(seq, payload, type, subtype) -> the frame of a request"),
    METHOD(find_write, "find_write(buffer, size) -> (type, subtype, end), or None"),
    METHOD(encode_written, "encode_written(seq, mode) -> the frame of a reply"),
    METHOD(find_written, "find_written(buffer, size) -> mode, or None"),
    {NULL, NULL, 0, NULL}};

static PyType_Slot Forms_slots[] = {{Py_tp_init, Forms_init},
                                    {Py_tp_dealloc, Forms_dealloc},
                                    {Py_tp_methods, Forms_methods},
                                    {Py_tp_new, PyType_GenericNew},
                                    {0, NULL}};

static PyType_Spec Forms_spec = {.name = "penstock.protocols.lrose._short.Forms",
                                 .basicsize = sizeof(Forms),
                                 .flags = Py_TPFLAGS_DEFAULT,
                                 .slots = Forms_slots};

static int module_exec(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&Forms_spec);
    if (type == NULL)
        return -1;
    int result = PyModule_AddObjectRef(module, "Forms", type);
    Py_DECREF(type);
    return result;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

static struct PyModuleDef module_def = {PyModuleDef_HEAD_INIT, .m_name = "_short",
                                        .m_slots = module_slots};

PyMODINIT_FUNC PyInit__short(void) { return PyModuleDef_Init(&module_def); }
