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

/* The same as places in the data: where each begins and ends, as two numbers of 64 bits; where the
 * last ends, and the bytes of all. */
static PyObject *locate(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer view;
    Py_ssize_t limit;
    if (!PyArg_ParseTuple(args, "y*n", &view, &limit))
        return NULL;
    Py_ssize_t at = 0, start, size, count = 0, room = 0, bytes = 0;
    PyObject *result = NULL, *places = PyBytes_FromStringAndSize(NULL, 0);
    while (places && at < view.len && whole(view.buf, view.len, at, &start, &size) && size <= limit) {
        if (count == room) {
            room = room ? 2 * room : 64;
            if (_PyBytes_Resize(&places, room * 2 * (Py_ssize_t)sizeof(int64_t)) < 0)
                break;
        }
        int64_t place[] = {start, start + size};
        memcpy(PyBytes_AS_STRING(places) + count++ * sizeof place, place, sizeof place);
        at = start + size;
        bytes += size;
    }
    if (places && _PyBytes_Resize(&places, count * 2 * (Py_ssize_t)sizeof(int64_t)) == 0)
        result = Py_BuildValue("Onn", places, at, bytes);
    Py_XDECREF(places);
    PyBuffer_Release(&view);
    return result;
}

/* Cut out what is at such places. */
static PyObject *cut(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer view, places;
    if (!PyArg_ParseTuple(args, "y*y*", &view, &places))
        return NULL;
    const int64_t *place = places.buf;
    Py_ssize_t count = places.len / (2 * (Py_ssize_t)sizeof *place);
    PyObject *found = PyList_New(count);
    for (Py_ssize_t i = 0; found && i < count; i++, place += 2) {
        int fits = 0 <= place[0] && place[0] <= place[1] && place[1] <= view.len;
        PyObject *one = fits ? PyBytes_FromStringAndSize((char *)view.buf + place[0],
                                                         (Py_ssize_t)(place[1] - place[0]))
                             : PyErr_Format(PyExc_ValueError, "a place outside of the data");
        if (one)
            PyList_SET_ITEM(found, i, one);
        else
            Py_CLEAR(found);
    }
    PyBuffer_Release(&view);
    PyBuffer_Release(&places);
    return found;
}

/* Add a command to the runs: the verb, and of each neighbour with it what follows the colon, and
 * the address. */
static int add_command(PyObject *runs, const char *data, Py_ssize_t length, PyObject *address)
{
    const char *colon = memchr(data, ':', (size_t)length);
    Py_ssize_t size = colon ? colon - data : length, count = PyList_GET_SIZE(runs);
    PyObject *run = count ? PyList_GET_ITEM(runs, count - 1) : NULL;
    PyObject *verb = run ? PyTuple_GET_ITEM(run, 0) : NULL;
    if (!run || PyBytes_GET_SIZE(verb) != size || memcmp(PyBytes_AS_STRING(verb), data, (size_t)size)) {
        run = Py_BuildValue("y#NN", data, size, PyList_New(0), PyList_New(0));
        if (!run || PyList_Append(runs, run) < 0) {
            Py_XDECREF(run);
            return -1;
        }
        Py_DECREF(run); /* the list has it */
    }
    PyObject *rest = PyBytes_FromStringAndSize(colon ? colon + 1 : data, colon ? length - size - 1 : 0);
    int failed = !rest || PyList_Append(PyTuple_GET_ITEM(run, 1), rest) < 0 ||
                 PyList_Append(PyTuple_GET_ITEM(run, 2), address) < 0;
    Py_XDECREF(rest);
    return failed ? -1 : 0;
}

/* Of (datagram, address) each: the commands of those that are one frame, in runs, and how many are
 * not; of (command, address) each: their runs. */
static PyObject *runs_of(PyObject *given, int are_framed)
{
    PyObject *items = PySequence_Fast(given, "commands are needed");
    PyObject *runs = items ? PyList_New(0) : NULL, *result = NULL;
    Py_ssize_t malformed = 0;
    for (Py_ssize_t i = 0; runs && i < PySequence_Fast_GET_SIZE(items); i++) {
        PyObject *data, *address;
        if (!PyArg_ParseTuple(PySequence_Fast_GET_ITEM(items, i), "SO", &data, &address))
            goto done;
        Py_ssize_t start = 0, length = PyBytes_GET_SIZE(data), size = length;
        if (are_framed &&
            (!length || !whole((unsigned char *)PyBytes_AS_STRING(data), length, 0, &start, &size) ||
             start + size != length))
            malformed++;
        else if (add_command(runs, PyBytes_AS_STRING(data) + start, size, address) < 0)
            goto done;
    }
    if (runs)
        result = are_framed ? Py_BuildValue("On", runs, malformed) : Py_NewRef(runs);
done:
    Py_XDECREF(runs);
    Py_XDECREF(items);
    return result;
}

static PyObject *decode_all(PyObject *Py_UNUSED(module), PyObject *datagrams)
{
    return runs_of(datagrams, 1);
}

static PyObject *group(PyObject *Py_UNUSED(module), PyObject *commands)
{
    return runs_of(commands, 0);
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

/* Make room for `total` bytes of frames: alone, or in one frame behind a head. */
static PyObject *frames_behind(const Py_buffer *head, Py_ssize_t total, char **out)
{
    Py_ssize_t size = head->len + total;
    PyObject *result =
        PyBytes_FromStringAndSize(NULL, head->buf ? header(size, NULL) + size : total);
    if (!result)
        return NULL;
    *out = PyBytes_AS_STRING(result);
    if (head->buf) {
        *out += header(size, *out);
        memcpy(*out, head->buf, head->len);
        *out += head->len;
    }
    return result;
}

static PyObject *join(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *payloads;
    Py_buffer head = {0};
    if (!PyArg_ParseTuple(args, "O|y*", &payloads, &head))
        return NULL;
    PyObject *result = NULL, *items = PySequence_Fast(payloads, "payloads are needed");
    Py_ssize_t count = items ? PySequence_Fast_GET_SIZE(items) : 0, total = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *one = PySequence_Fast_GET_ITEM(items, i);
        if (!PyBytes_Check(one)) {
            PyErr_Format(PyExc_TypeError, "payload %zd is not bytes", i);
            goto done;
        }
        total += header(PyBytes_GET_SIZE(one), NULL) + PyBytes_GET_SIZE(one);
    }
    char *out;
    result = items ? frames_behind(&head, total, &out) : NULL;
    for (Py_ssize_t i = 0; result && i < count; i++) {
        PyObject *one = PySequence_Fast_GET_ITEM(items, i);
        Py_ssize_t size = PyBytes_GET_SIZE(one);
        out += header(size, out);
        memcpy(out, PyBytes_AS_STRING(one), size);
        out += size;
    }
done:
    Py_XDECREF(items);
    PyBuffer_Release(&head);
    return result;
}

/* How many payloads from `start` on, at most `most`, have up to `room` bytes, with `more` for each. */
static PyObject *fitting(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *payloads;
    Py_ssize_t start, most, room, more, count = 0;
    if (!PyArg_ParseTuple(args, "Onnnn", &payloads, &start, &most, &room, &more))
        return NULL;
    PyObject *items = PySequence_Fast(payloads, "payloads are needed");
    if (!items)
        return NULL;
    for (Py_ssize_t left = PySequence_Fast_GET_SIZE(items) - start; count < most && count < left; count++) {
        PyObject *one = PySequence_Fast_GET_ITEM(items, start + count);
        if (!PyBytes_Check(one)) {
            Py_DECREF(items);
            return PyErr_Format(PyExc_TypeError, "payload %zd is not bytes", start + count);
        }
        if (PyBytes_GET_SIZE(one) > room)
            break;
        room -= PyBytes_GET_SIZE(one) + more;
    }
    Py_DECREF(items);
    return PyLong_FromSsize_t(count);
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

static Py_ssize_t row_count(const Py_buffer *offsets)
{
    return offsets->len / (Py_ssize_t)sizeof(int32_t) - 1;
}

/* One frame of a head and the frames of all rows. */
static PyObject *join_columns(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer head, views[2];
    PyObject *columns, *result = NULL;
    if (!PyArg_ParseTuple(args, "y*O", &head, &columns))
        return NULL;
    PyObject *items = PySequence_Fast(columns, "columns are needed");
    Py_ssize_t total = 0;
    char *out = NULL;
    /* Measured first, and then written. */
    for (int writes = 0; items && writes < 2; writes++) {
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items); i++) {
            if (!PyArg_ParseTuple(PySequence_Fast_GET_ITEM(items, i), "y*y*", &views[0], &views[1]))
                goto failed;
            const int32_t *places = views[0].buf;
            int fits = valid(&views[0], &views[1]);
            for (Py_ssize_t row = 0; fits && row < row_count(&views[0]); row++) {
                if (writes)
                    out = put(out, places + row, &views[1]);
                else
                    total += header(places[row + 1] - places[row], NULL) + places[row + 1] - places[row];
            }
            PyBuffer_Release(&views[0]);
            PyBuffer_Release(&views[1]);
            if (!fits)
                goto failed;
        }
        if (!writes && !(result = frames_behind(&head, total, &out)))
            goto failed;
    }
    goto done;
failed:
    Py_CLEAR(result);
done:
    Py_XDECREF(items);
    PyBuffer_Release(&head);
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
        Py_ssize_t count = row_count(&offsets);
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
    {"decode_all", decode_all, METH_O, "Return the commands of datagrams, and how many are no frame."},
    {"group", group, METH_O, "Return commands in runs of one verb."},
    {"locate", locate, METH_VARARGS, "Return where what whole frames hold is, and where they end."},
    {"cut", cut, METH_VARARGS, "Return what is at such places."},
    {"join", join, METH_VARARGS, "Return the frames of some bytes, or one frame of a head and them."},
    {"fitting", fitting, METH_VARARGS, "Return how many payloads fit."},
    {"join_columns", join_columns, METH_VARARGS, "Return one frame of a head and the rows of columns."},
    {"frames", frames, METH_VARARGS, "Return the frame of each row of columns."},
    {NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_frames", NULL, 0, methods};

PyMODINIT_FUNC PyInit__frames(void)
{
    return PyModule_Create(&module);
}
