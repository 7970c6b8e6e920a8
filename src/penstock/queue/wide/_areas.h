/* How does a process survive access to a mapped file that was truncated?
 *
 * A part of _ring.c.
 */
#include <signal.h>

/* Access to a page past the end of a file, or without disk space, raises SIGBUS. So mapped queues are
 * registered here: for a lost page of one, the handler maps zeros in its place and sets a mark, and the
 * interrupted call raises an error. Every other SIGBUS goes to the previous handler. */
typedef struct Area {
    uintptr_t base; /* 0: not in use */
    size_t size;
    unsigned long long id; /* unique for every mapping: addresses are reused */
    int is_cut;
    struct Area *next;
} Area;

static Area *areas; /* only grows: the signal may come at any time */
static struct sigaction signal_before;
static size_t page_size;

static void on_bus_error(int number, siginfo_t *info, void *context) {
    uintptr_t at = (uintptr_t)info->si_addr;
    int saved = errno;
    for (Area *a = __atomic_load_n(&areas, __ATOMIC_ACQUIRE); info->si_code == BUS_ADRERR && a != NULL; a = a->next) {
        uintptr_t base = __atomic_load_n(&a->base, __ATOMIC_ACQUIRE);
        if (base == 0 || at < base || at - base >= a->size)
            continue;
        void *page = (void *)(at & ~(uintptr_t)(page_size - 1));
        if (mmap(page, page_size, PROT_READ | PROT_WRITE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) ==
            MAP_FAILED)
            break;
        __atomic_store_n(&a->is_cut, 1, __ATOMIC_RELEASE);
        errno = saved;
        return;
    }
    if (signal_before.sa_flags & SA_SIGINFO)
        signal_before.sa_sigaction(number, info, context);
    else if (signal_before.sa_handler != SIG_DFL && signal_before.sa_handler != SIG_IGN)
        signal_before.sa_handler(number);
    else
        sigaction(SIGBUS, &(struct sigaction){.sa_handler = SIG_DFL}, NULL); /* raised again, it ends the process */
}

/* The area that starts at an address, or NULL. */
static Area *area_of(const void *memory) {
    Area *a = areas;
    while (a != NULL && a->base != (uintptr_t)memory)
        a = a->next;
    return a;
}

/* watch(mapping): make a lost page an error. Returns the id for `unwatch`. */
static PyObject *watch(PyObject *Py_UNUSED(module), PyObject *mapping) {
    Py_buffer memory;
    if (PyObject_GetBuffer(mapping, &memory, PyBUF_SIMPLE) != 0)
        return NULL;
    static unsigned long long last_id;
    uintptr_t base = (uintptr_t)memory.buf;
    Area *a = area_of(memory.buf); /* of an unmapped one that is not unwatched yet */
    if (a != NULL)
        __atomic_store_n(&a->base, 0, __ATOMIC_RELEASE);
    for (a = areas; a != NULL && a->base != 0;)
        a = a->next;
    if (areas == NULL) {
        page_size = (size_t)sysconf(_SC_PAGESIZE);
        struct sigaction action = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER};
        sigaction(SIGBUS, &action, &signal_before);
    }
    if (a == NULL && (a = PyMem_RawCalloc(1, sizeof *a)) != NULL) {
        a->next = areas;
        __atomic_store_n(&areas, a, __ATOMIC_RELEASE);
    }
    if (a != NULL) {
        a->size = (size_t)memory.len;
        a->id = ++last_id;
        a->is_cut = 0;
        __atomic_store_n(&a->base, base, __ATOMIC_RELEASE);
    }
    PyBuffer_Release(&memory);
    return a == NULL ? PyErr_NoMemory() : PyLong_FromUnsignedLongLong(a->id);
}

/* unwatch(id): the mapping was unmapped. */
static PyObject *unwatch(PyObject *Py_UNUSED(module), PyObject *id) {
    unsigned long long wanted = PyLong_AsUnsignedLongLong(id);
    Area *a = areas;
    while (a != NULL && a->id != wanted)
        a = a->next;
    if (a != NULL && !PyErr_Occurred())
        __atomic_store_n(&a->base, 0, __ATOMIC_RELEASE);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}
