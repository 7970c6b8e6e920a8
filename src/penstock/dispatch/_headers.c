/* The headers of a batch of uProtocol messages, without decoding them.
 *
 * A UMessage is, in protobuf, its attributes (field 1) and its payload (field 2); the attributes
 * begin with the id (field 1: two fixed64). Messages that have the same attributes behind the id
 * are one group. What is not so, or cut off, or has an id that is not of version 7, is a group of
 * one without attributes: the protobuf library decides about it. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

enum { ID_SIZE = 20, KEY_SIZE = 17, KEY_AT = 3 };

typedef struct {
    const unsigned char *data;
    Py_ssize_t begin, end; /* of the attributes */
    int has_payload;
} Header;

/* Find the attributes of a message; 0: they are not where they usually are. */
static int find(const unsigned char *data, Py_ssize_t size, Header *header)
{
    if (size < 2 + ID_SIZE || data[0] != 0x0A)
        return 0;
    Py_ssize_t length = data[1], begin = 2;
    if (length > 0x7F) {
        if (data[2] > 0x7F)
            return 0;
        length = (length & 0x7F) | (Py_ssize_t)data[2] << 7;
        begin = 3;
    }
    if (length < ID_SIZE || length > size - begin)
        return 0;
    const unsigned char *id = data + begin;
    if (id[0] != 0x0A || id[1] != 0x12 || id[2] != 0x09 || id[11] != 0x11)
        return 0;
    if (id[4] >> 4 != 7 || id[19] >> 6 != 2)
        return 0;
    Py_ssize_t at = begin + length;
    *header = (Header){data, begin, at, 0};
    if (at == size)
        return 1;
    if (data[at++] != 0x12)
        return 0;
    Py_ssize_t payload = 0;
    for (int shift = 0; shift < 28; shift += 7) {
        if (at == size)
            return 0;
        unsigned char byte = data[at++];
        payload |= (Py_ssize_t)(byte & 0x7F) << shift;
        if (byte < 0x80) {
            header->has_payload = 1;
            return payload == size - at;
        }
    }
    return 0;
}

static int same(const Header *a, const Header *b)
{
    Py_ssize_t size = a->end - a->begin;
    return a->data && size == b->end - b->begin && a->has_payload == b->has_payload &&
           !memcmp(a->data + a->begin + ID_SIZE, b->data + b->begin + ID_SIZE, size - ID_SIZE);
}

/* Append to a list, and let go of what is appended. */
static int append(PyObject *list, PyObject *one)
{
    int failed = !one || PyList_Append(list, one) < 0;
    Py_XDECREF(one);
    return failed ? -1 : 0;
}

/* Add a new group: lists of places, messages, ids and times, then what is the same for all. */
static PyObject *add_group(PyObject *groups, const Header *header)
{
    Py_ssize_t rest = header->data ? header->begin + ID_SIZE : 0;
    PyObject *group =
        Py_BuildValue("[][][][]nny#O", header->begin, header->end,
                      header->data ? (const char *)header->data + rest : "", header->end - rest,
                      header->has_payload ? Py_True : Py_False);
    if (append(groups, group) < 0)
        return NULL;
    return group; /* the list has it */
}

/* Return the group of a message with this header; make it if there is none. */
static PyObject *group_of(PyObject *groups, PyObject *known, const Header *header)
{
    const char *begin = (const char *)header->data + header->begin + ID_SIZE;
    Py_ssize_t size = header->end - header->begin - ID_SIZE;
    PyObject *key = Py_BuildValue("(y#i)", begin, size, header->has_payload);
    if (!key)
        return NULL;
    PyObject *group = PyDict_GetItemWithError(known, key);
    if (!group && !PyErr_Occurred()) {
        group = add_group(groups, header);
        if (group && PyDict_SetItem(known, key, group) < 0)
            group = NULL;
    }
    Py_DECREF(key);
    return group;
}

/* Add a message to its group; the time in its id is 48 bits behind the version and chance. */
static int add(PyObject *group, Py_ssize_t place, PyObject *message, const Header *header)
{
    if (append(PyTuple_GET_ITEM(group, 0), PyLong_FromSsize_t(place)) < 0 ||
        PyList_Append(PyTuple_GET_ITEM(group, 1), message) < 0)
        return -1;
    if (!header->data)
        return 0;
    const unsigned char *key = header->data + header->begin + KEY_AT;
    long long ms = 0;
    for (int i = 7; i >= 2; i--)
        ms = ms << 8 | key[i];
    PyObject *id = PyBytes_FromStringAndSize((const char *)key, KEY_SIZE);
    if (append(PyTuple_GET_ITEM(group, 2), id) < 0)
        return -1;
    return append(PyTuple_GET_ITEM(group, 3), PyLong_FromLongLong(ms));
}

static int add_all(PyObject *messages, Py_ssize_t largest, PyObject *groups, PyObject *known)
{
    Header last = {0};
    PyObject *group = NULL;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(messages); i++) {
        PyObject *one = PySequence_Fast_GET_ITEM(messages, i);
        if (!PyBytes_CheckExact(one)) {
            PyErr_SetString(PyExc_TypeError, "a batch is a sequence of bytes");
            return -1;
        }
        Header header;
        Py_ssize_t size = PyBytes_GET_SIZE(one);
        if (size > largest || !find((unsigned char *)PyBytes_AS_STRING(one), size, &header)) {
            header = (Header){0};
            group = add_group(groups, &header);
        } else if (!same(&last, &header)) {
            group = group_of(groups, known, &header);
        }
        if (!group || add(group, i, one, &header) < 0)
            return -1;
        last = header;
    }
    return 0;
}

static PyObject *scan(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *given;
    Py_ssize_t largest;
    if (!PyArg_ParseTuple(args, "On", &given, &largest))
        return NULL;
    PyObject *messages = PySequence_Fast(given, "a batch is a sequence of bytes");
    PyObject *groups = PyList_New(0), *known = PyDict_New();
    if (!messages || !groups || !known || add_all(messages, largest, groups, known) < 0)
        Py_CLEAR(groups);
    Py_XDECREF(messages);
    Py_XDECREF(known);
    return groups;
}

static PyMethodDef methods[] = {
    {"scan", scan, METH_VARARGS, "Return the groups of a batch of messages."},
    {NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_headers", NULL, 0, methods};

PyMODINIT_FUNC PyInit__headers(void)
{
    return PyModule_Create(&module);
}
