/* Frames of LHHTTT by many: a batch of a thousand messages is split or joined in one call.
 *
 * What is not a whole frame ends the work; frames.py then says what is wrong with it. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

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

/* Of (datagram, address) each: what those hold that are one frame, and how many are not. */
static PyObject *decode_all(PyObject *Py_UNUSED(module), PyObject *datagrams)
{
    PyObject *items = PySequence_Fast(datagrams, "datagrams are needed");
    PyObject *found = items ? PyList_New(0) : NULL, *result = NULL;
    Py_ssize_t malformed = 0;
    for (Py_ssize_t i = 0; found && i < PySequence_Fast_GET_SIZE(items); i++) {
        PyObject *data, *address, *item = PySequence_Fast_GET_ITEM(items, i);
        if (!PyArg_ParseTuple(item, "SO", &data, &address))
            goto done;
        Py_ssize_t start, size, length = PyBytes_GET_SIZE(data);
        if (!length || !whole((unsigned char *)PyBytes_AS_STRING(data), length, 0, &start, &size) ||
            start + size != length) {
            malformed++;
            continue;
        }
        PyObject *body = PyBytes_FromStringAndSize(PyBytes_AS_STRING(data) + start, size);
        PyObject *pair = body ? PyTuple_Pack(2, body, address) : NULL;
        int failed = !pair || PyList_Append(found, pair) < 0;
        Py_XDECREF(body);
        Py_XDECREF(pair);
        if (failed)
            goto done;
    }
    result = found ? Py_BuildValue("On", found, malformed) : NULL;
done:
    Py_XDECREF(found);
    Py_XDECREF(items);
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

/* Columns: where each payload begins in the bytes of all, and where the last ends. */
static int valid(const Py_buffer *offsets, const Py_buffer *data)
{
    const int32_t *places = offsets->buf;
    Py_ssize_t count = offsets->len / (Py_ssize_t)sizeof *places - 1;
    int fits = offsets->len % (Py_ssize_t)sizeof *places == 0 && count >= 0 && places[0] >= 0 &&
               places[count] <= data->len;
    for (Py_ssize_t i = 0; fits && i < count; i++)
        fits = places[i] <= places[i + 1];
    if (!fits)
        PyErr_SetString(PyExc_ValueError, "columns that do not fit together");
    return fits;
}

static char *put(char *out, const int32_t *place, const Py_buffer *data)
{
    Py_ssize_t size = place[1] - place[0];
    out += header(size, out);
    memcpy(out, (char *)data->buf + place[0], size);
    return out + size;
}

static PyObject *join_columns(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer offsets, data;
    if (!PyArg_ParseTuple(args, "y*y*", &offsets, &data))
        return NULL;
    PyObject *result = NULL;
    if (valid(&offsets, &data)) {
        const int32_t *places = offsets.buf;
        Py_ssize_t count = offsets.len / (Py_ssize_t)sizeof *places - 1;
        Py_ssize_t total = places[count] - places[0];
        for (Py_ssize_t i = 0; i < count; i++)
            total += header(places[i + 1] - places[i], NULL);
        result = PyBytes_FromStringAndSize(NULL, total);
        char *out = result ? PyBytes_AS_STRING(result) : NULL;
        for (Py_ssize_t i = 0; out && i < count; i++)
            out = put(out, places + i, &data);
    }
    PyBuffer_Release(&offsets);
    PyBuffer_Release(&data);
    return result;
}

static PyObject *frames(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer offsets, data;
    if (!PyArg_ParseTuple(args, "y*y*", &offsets, &data))
        return NULL;
    PyObject *result = NULL;
    if (valid(&offsets, &data)) {
        const int32_t *places = offsets.buf;
        Py_ssize_t count = offsets.len / (Py_ssize_t)sizeof *places - 1;
        result = PyList_New(count);
        for (Py_ssize_t i = 0; result && i < count; i++) {
            Py_ssize_t size = places[i + 1] - places[i];
            PyObject *one = PyBytes_FromStringAndSize(NULL, header(size, NULL) + size);
            if (one) {
                put(PyBytes_AS_STRING(one), places + i, &data);
                PyList_SET_ITEM(result, i, one);
            } else
                Py_CLEAR(result);
        }
    }
    PyBuffer_Release(&offsets);
    PyBuffer_Release(&data);
    return result;
}

static PyMethodDef methods[] = {
    {"split", split, METH_VARARGS, "Return what whole frames hold, and where they end."},
    {"decode_all", decode_all, METH_O, "Return what datagrams hold, and how many are no frame."},
    {"join", join, METH_O, "Return the frames of some bytes."},
    {"join_columns", join_columns, METH_VARARGS, "Return the frames of the rows of columns."},
    {"frames", frames, METH_VARARGS, "Return the frame of each row of columns."},
    {NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_frames", NULL, 0, methods};

PyMODINIT_FUNC PyInit__frames(void)
{
    return PyModule_Create(&module);
}
