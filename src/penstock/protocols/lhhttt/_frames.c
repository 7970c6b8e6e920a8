/* Frames of LHHTTT by many: a batch of a thousand messages is split or joined in one call.
 *
 * What is not a whole frame ends the work; frames.py then says what is wrong with it. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* The value of a hexadecimal digit; -1: it is none. */
static int hex_value(unsigned char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    if (c >= 'A' && c <= 'F')
        return c - 'A' + 10;
    return -1;
}

/* Where the text of the frame at `at` begins, and its size; 0: there is no whole frame. */
static int whole(const unsigned char *data, Py_ssize_t length, Py_ssize_t at, Py_ssize_t *start,
                 Py_ssize_t *size)
{
    int count = hex_value(data[at]);
    if (count < 1 || count > length - at - 1)
        return 0;
    Py_ssize_t value = 0; /* fifteen digits at most: it does not overflow */
    for (Py_ssize_t i = at + 1; i <= at + count; i++) {
        int d = hex_value(data[i]);
        if (d < 0)
            return 0;
        value = value << 4 | d;
    }
    *start = at + 1 + count;
    *size = value;
    return value <= length - *start;
}

static PyObject *split(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer view;
    Py_ssize_t limit;
    if (!PyArg_ParseTuple(args, "y*n", &view, &limit))
        return NULL;
    PyObject *result = NULL, *found = PyList_New(0);
    Py_ssize_t at = 0, start, size;
    if (!found)
        goto done;
    while (at < view.len && whole(view.buf, view.len, at, &start, &size) && size <= limit) {
        PyObject *one = PyBytes_FromStringAndSize((char *)view.buf + start, size);
        int failed = !one || PyList_Append(found, one) < 0;
        Py_XDECREF(one);
        if (failed)
            goto done;
        at = start + size;
    }
    result = Py_BuildValue("On", found, at);
done:
    Py_XDECREF(found);
    PyBuffer_Release(&view);
    return result;
}

/* Writes the header of a frame, if `out` is given, and returns its length. */
static Py_ssize_t header(Py_ssize_t size, char *out)
{
    static const char digits[] = "0123456789abcdef";
    int count = 1;
    while (count < 15 && size >> 4 * count)
        count++;
    if (out) {
        *out++ = digits[count];
        for (int i = count - 1; i >= 0; i--)
            *out++ = digits[size >> 4 * i & 15];
    }
    return 1 + count;
}

static PyObject *join(PyObject *Py_UNUSED(module), PyObject *payloads)
{
    PyObject *items = PySequence_Fast(payloads, "payloads are needed");
    if (!items)
        return NULL;
    PyObject *result = NULL;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(items), total = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *one = PySequence_Fast_GET_ITEM(items, i);
        if (!PyBytes_Check(one)) {
            PyErr_Format(PyExc_TypeError, "payload %zd is not bytes", i);
            goto done;
        }
        total += header(PyBytes_GET_SIZE(one), NULL) + PyBytes_GET_SIZE(one);
    }
    result = PyBytes_FromStringAndSize(NULL, total);
    if (!result)
        goto done;
    char *out = PyBytes_AS_STRING(result);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *one = PySequence_Fast_GET_ITEM(items, i);
        Py_ssize_t size = PyBytes_GET_SIZE(one);
        out += header(size, out);
        memcpy(out, PyBytes_AS_STRING(one), size);
        out += size;
    }
done:
    Py_DECREF(items);
    return result;
}

static PyMethodDef methods[] = {
    {"split", split, METH_VARARGS, "Return what whole frames hold, and where they end."},
    {"join", join, METH_O, "Return the frames of some bytes."},
    {NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_frames", NULL, 0, methods};

PyMODINIT_FUNC PyInit__frames(void)
{
    return PyModule_Create(&module);
}
