/* How do columns become messages?
 *
 * In C because Python would create three tuples for each message instead of one, and because messages
 * cannot be in a reference cycle: the garbage collector need not track millions of them.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

enum { SEQ, TIME, CREATED, TYPE, SUBTYPE, STREAM, ATTRIBUTES, PAYLOAD, FIELDS };

static PyObject *make_messages(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    /* seqs, times, types, subtypes, payloads; a queue stores one time of a message. */
    static const int column_of[FIELDS] = {1, 2, 2, 3, 4, 0, 0, 5};
    if (nargs != 6 || !PyType_Check(args[0]) ||
        !PyType_IsSubtype((PyTypeObject *)args[0], &PyTuple_Type))
        return PyErr_Format(PyExc_TypeError,
                            "make_messages(Message, seqs, times, types, subtypes, payloads)");
    PyTypeObject *kind = (PyTypeObject *)args[0];
    Py_ssize_t count = PyList_Check(args[1]) ? PyList_GET_SIZE(args[1]) : 0;
    for (int i = 1; i < nargs; i++)
        if (!PyList_Check(args[i]) || PyList_GET_SIZE(args[i]) != count)
            return PyErr_Format(PyExc_ValueError, "the columns are lists of one length");
    PyObject *messages = PyList_New(count);
    for (Py_ssize_t row = 0; messages != NULL && row < count; row++) {
        PyObject *message = kind->tp_alloc(kind, FIELDS);
        if (message == NULL) {
            Py_CLEAR(messages);
            break;
        }
        for (int field = 0; field < FIELDS; field++) {
            int column = column_of[field];
            PyObject *item = column ? PyList_GET_ITEM(args[column], row) : Py_None;
            PyTuple_SET_ITEM(message, field, Py_NewRef(item));
        }
        PyObject_GC_UnTrack(message);
        PyList_SET_ITEM(messages, row, message);
    }
    return messages;
}

static PyMethodDef methods[] = {
    {"make_messages", (PyCFunction)(void (*)(void))make_messages, METH_FASTCALL,
     "make_messages(Message, seqs, times, types, subtypes, payloads) -> list"},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module_def = {PyModuleDef_HEAD_INIT, .m_name = "_rows",
                                        .m_methods = methods};

PyMODINIT_FUNC PyInit__rows(void) { return PyModuleDef_Init(&module_def); }
