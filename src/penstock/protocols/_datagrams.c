/* How do many datagrams pass in one call of the system?
 *
 * By recvmmsg and sendmmsg. Whole datagrams come as (payload, address); what was cut comes apart
 * from them, and what the kernel dropped is counted.
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <arpa/inet.h>
#include <errno.h>
#include <math.h>
#include <netinet/in.h>
#include <netinet/udp.h>
#include <poll.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>

enum { MOST = 1024, KNOWN = 256 };

/* Datagrams of one size to one peer, one behind the other, pass through the kernel as one that it
 * cuts at the end: a run. Its datagrams fit the packets of every network. */
enum { LONGEST_RUN = 64, LARGEST_IN_RUN = 1200, LARGEST_RUN = 65000 };
#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif

typedef union {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
    struct sockaddr_un local;
} Address;

/* A peer that was heard or answered lately: who asks often is not translated each time. */
typedef struct {
    PyObject *name;
    socklen_t length;
    Address address;
} Peer;

typedef union {
    char bytes[CMSG_SPACE(sizeof(uint32_t))];
    struct cmsghdr aligned;
} Control;

typedef struct {
    PyObject_HEAD
    unsigned limit;
    size_t size;          /* bytes of one datagram, at most */
    char *room;           /* `limit` of them; pages that nothing came to take no memory */
    struct mmsghdr *headers;
    struct iovec *parts;
    Address *addresses;
    Control *controls;
    Peer heard[KNOWN], told[KNOWN];
    uint32_t overflow;    /* the kernel's count, which wraps */
    unsigned long long dropped;
    char runs;            /* whether the kernel knows runs: 1, or -1 if not; 0: nobody asked */
    char is_busy;         /* one thread at a time: the arrays are in the hands of the kernel */
} Batches;

static PyObject *name_of(const Address *address, socklen_t length)
{
    char text[INET6_ADDRSTRLEN];
    switch (length >= sizeof(sa_family_t) ? address->any.sa_family : AF_UNSPEC) {
    case AF_INET:
        inet_ntop(AF_INET, &address->v4.sin_addr, text, sizeof text);
        return Py_BuildValue("(si)", text, ntohs(address->v4.sin_port));
    case AF_INET6:
        inet_ntop(AF_INET6, &address->v6.sin6_addr, text, sizeof text);
        return Py_BuildValue("(siII)", text, ntohs(address->v6.sin6_port),
                             ntohl(address->v6.sin6_flowinfo), address->v6.sin6_scope_id);
    case AF_UNIX: {
        /* One that is bound to no path cannot be answered. */
        size_t head = offsetof(struct sockaddr_un, sun_path);
        const char *path = address->local.sun_path;
        if (length > head && path[0] != '\0')
            return PyUnicode_DecodeFSDefaultAndSize(path, (Py_ssize_t)strnlen(path, length - head));
    }
    }
    Py_RETURN_NONE;
}

static int address_of(PyObject *name, Peer *peer)
{
    Address *to = &peer->address;
    memset(to, 0, sizeof *to);
    if (PyUnicode_Check(name)) {
        PyObject *path = NULL;
        if (!PyUnicode_FSConverter(name, &path))
            return -1;
        size_t size = (size_t)PyBytes_GET_SIZE(path);
        int fits = size > 0 && size < sizeof to->local.sun_path;
        to->local.sun_family = AF_UNIX;
        memcpy(to->local.sun_path, PyBytes_AS_STRING(path), fits ? size : 0);
        peer->length = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + size + 1);
        Py_DECREF(path);
        if (!fits)
            PyErr_SetString(PyExc_ValueError, "a path of a socket has 1 to 107 bytes");
        return fits ? 0 : -1;
    }
    const char *host;
    unsigned int port, flow = 0, scope = 0;
    if (!PyTuple_Check(name) || !PyArg_ParseTuple(name, "sI|II", &host, &port, &flow, &scope)) {
        if (!PyErr_Occurred() || PyErr_ExceptionMatches(PyExc_TypeError))
            PyErr_SetString(PyExc_TypeError, "an address is (host, port) or a path");
        return -1;
    }
    if (port <= 65535 && inet_pton(AF_INET, host, &to->v4.sin_addr) == 1) {
        to->v4.sin_family = AF_INET;
        to->v4.sin_port = htons((uint16_t)port);
        peer->length = sizeof to->v4;
    } else if (port <= 65535 && inet_pton(AF_INET6, host, &to->v6.sin6_addr) == 1) {
        to->v6.sin6_family = AF_INET6;
        to->v6.sin6_port = htons((uint16_t)port);
        to->v6.sin6_flowinfo = htonl(flow);
        to->v6.sin6_scope_id = scope;
        peer->length = sizeof to->v6;
    } else {
        PyErr_Format(PyExc_ValueError, "no numeric address: %R", name);
        return -1;
    }
    return 0;
}

/* Return a new reference to the name of an address, the same object as last time. */
static PyObject *known_name(Batches *self, const Address *address, socklen_t length)
{
    uint32_t hash = 2166136261u;
    for (socklen_t i = 0; i < length; i++)
        hash = (hash ^ ((const unsigned char *)address)[i]) * 16777619u;
    Peer *peer = &self->heard[(hash ^ (hash >> 15)) % KNOWN];
    if (peer->name == NULL || peer->length != length ||
        memcmp(&peer->address, address, length) != 0) {
        PyObject *name = name_of(address, length);
        if (name == NULL)
            return NULL;
        Py_XSETREF(peer->name, name);
        peer->length = length;
        memcpy(&peer->address, address, length);
    }
    return Py_NewRef(peer->name);
}

/* Names are told apart by the object: it is kept, so that no other can have its place. */
static const Peer *known_address(Batches *self, PyObject *name)
{
    Peer *peer = &self->told[((uintptr_t)name >> 4) % KNOWN];
    if (peer->name != name) {
        Py_CLEAR(peer->name);
        if (address_of(name, peer) < 0)
            return NULL;
        peer->name = Py_NewRef(name);
    }
    return peer;
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

/* One call of the system, again until something passes or the time is over; -1 for an error. */
static int pass(Batches *self, int descriptor, unsigned count, double deadline, int receives)
{
    struct pollfd one = {.fd = descriptor, .events = receives ? POLLIN : POLLOUT};
    for (;;) {
        int done, reason, ready = -1;
        Py_BEGIN_ALLOW_THREADS
        done = receives ? recvmmsg(descriptor, self->headers, count, MSG_DONTWAIT | MSG_TRUNC, NULL)
                        : sendmmsg(descriptor, self->headers, count, MSG_DONTWAIT | MSG_NOSIGNAL);
        reason = errno;
        if (done < 0 && (reason == EAGAIN || reason == EWOULDBLOCK)) {
            double left = deadline - now();
            ready = poll(&one, 1, left <= 0 ? 0 : left > 1e6 ? -1 : (int)ceil(left * 1e3));
            reason = errno;
        }
        Py_END_ALLOW_THREADS
        if (done >= 0 || ready == 0)
            return done < 0 ? 0 : done;
        errno = reason;
        if (ready < 0 && reason != EINTR)
            PyErr_SetFromErrno(PyExc_OSError);
        errno = reason; /* for who looks at it after an error */
        if (ready < 0 && (PyErr_Occurred() || PyErr_CheckSignals() < 0))
            return -1;
    }
}

static int begin(Batches *self, PyObject *timeout, double *deadline)
{
    double seconds = timeout == Py_None ? 1e9 : PyFloat_AsDouble(timeout);
    if (seconds == -1.0 && PyErr_Occurred())
        return -1;
    if (self->is_busy) {
        PyErr_SetString(PyExc_RuntimeError, "another thread is using it");
        return -1;
    }
    *deadline = now() + seconds;
    self->is_busy = 1;
    return 0;
}

static void note_dropped(Batches *self, struct msghdr *header)
{
    for (struct cmsghdr *each = CMSG_FIRSTHDR(header); each; each = CMSG_NXTHDR(header, each))
        if (each->cmsg_level == SOL_SOCKET && each->cmsg_type == SO_RXQ_OVFL) {
            uint32_t count;
            memcpy(&count, CMSG_DATA(each), sizeof count);
            self->dropped += (uint32_t)(count - self->overflow);
            self->overflow = count;
        }
}

static int add(PyObject *list, PyObject *item)
{
    int result = item == NULL ? -1 : PyList_Append(list, item);
    Py_XDECREF(item);
    return result;
}

static PyObject *receive(Batches *self, PyObject *args)
{
    int descriptor;
    unsigned limit;
    PyObject *timeout;
    double deadline;
    if (!PyArg_ParseTuple(args, "iIO", &descriptor, &limit, &timeout) || begin(self, timeout, &deadline) < 0)
        return NULL;
    if (limit > self->limit)
        limit = self->limit;
    for (unsigned i = 0; i < limit; i++) {
        self->parts[i] = (struct iovec){self->room + i * self->size, self->size};
        self->headers[i].msg_hdr = (struct msghdr){
            .msg_name = &self->addresses[i], .msg_namelen = sizeof(Address),
            .msg_iov = &self->parts[i], .msg_iovlen = 1,
            .msg_control = &self->controls[i], .msg_controllen = sizeof(Control)};
    }
    int count = pass(self, descriptor, limit, deadline, 1);
    PyObject *whole = count < 0 ? NULL : PyList_New(0);
    PyObject *cut = whole == NULL ? NULL : PyList_New(0);
    for (int i = 0; cut != NULL && i < count; i++) {
        struct msghdr *header = &self->headers[i].msg_hdr;
        size_t length = self->headers[i].msg_len; /* of the datagram, also if it did not fit */
        int is_cut = (header->msg_flags & MSG_TRUNC) != 0 || length > self->size;
        note_dropped(self, header);
        PyObject *name = known_name(self, &self->addresses[i], header->msg_namelen);
        PyObject *payload = name == NULL ? NULL : PyBytes_FromStringAndSize(
            self->parts[i].iov_base, (Py_ssize_t)(length > self->size ? self->size : length));
        PyObject *item = payload == NULL ? NULL
                         : is_cut ? Py_BuildValue("(OOn)", payload, name, (Py_ssize_t)length)
                                  : PyTuple_Pack(2, payload, name);
        Py_XDECREF(payload);
        Py_XDECREF(name);
        if (add(is_cut ? cut : whole, item) < 0)
            Py_CLEAR(cut);
    }
    self->is_busy = 0;
    PyObject *result = cut == NULL ? NULL : PyTuple_Pack(2, whole, cut);
    Py_XDECREF(whole);
    Py_XDECREF(cut);
    return result;
}

/* A kernel that does not know runs would send one as a single datagram. */
static int knows_runs(Batches *self, int descriptor)
{
    if (self->runs == 0) {
        int size = 0;
        socklen_t length = sizeof size;
        self->runs = getsockopt(descriptor, IPPROTO_UDP, UDP_SEGMENT, &size, &length) < 0 ? -1 : 1;
    }
    return self->runs > 0;
}

/* Make headers of the parts, of which each has an address or none; return how many. */
static unsigned make_headers(Batches *self, unsigned parts, const socklen_t *lengths, int in_runs)
{
    unsigned count = 0;
    for (unsigned first = 0, end; first < parts; first = end) {
        size_t size = self->parts[first].iov_len;
        end = first + 1;
        if (in_runs && lengths[first] && 0 < size && size <= LARGEST_IN_RUN)
            while (end < parts && end - first < LONGEST_RUN &&
                   (end - first + 1) * size <= LARGEST_RUN && self->parts[end].iov_len == size &&
                   lengths[end] == lengths[first] &&
                   memcmp(&self->addresses[end], &self->addresses[first], lengths[first]) == 0)
                end++;
        struct msghdr *header = &self->headers[count].msg_hdr;
        *header = (struct msghdr){
            .msg_name = lengths[first] ? &self->addresses[first] : NULL,
            .msg_namelen = lengths[first],
            .msg_iov = &self->parts[first], .msg_iovlen = end - first};
        if (end - first > 1) {
            uint16_t segment = (uint16_t)size;
            header->msg_control = &self->controls[count];
            header->msg_controllen = CMSG_SPACE(sizeof segment);
            struct cmsghdr *control = CMSG_FIRSTHDR(header);
            control->cmsg_level = IPPROTO_UDP;
            control->cmsg_type = UDP_SEGMENT;
            control->cmsg_len = CMSG_LEN(sizeof segment);
            memcpy(CMSG_DATA(control), &segment, sizeof segment);
        }
        count++;
    }
    return count;
}

/* Send the parts; return how many the kernel took, or -1 for an error. */
static int send_parts(Batches *self, int descriptor, unsigned parts, const socklen_t *lengths,
                      double deadline)
{
    int in_runs = knows_runs(self, descriptor);
    unsigned count = make_headers(self, parts, lengths, in_runs);
    int taken = pass(self, descriptor, count, deadline, 0);
    if (taken < 0 && self->headers[0].msg_hdr.msg_iovlen > 1 &&
        (errno == EIO || errno == EINVAL || errno == EMSGSIZE || errno == EOPNOTSUPP)) {
        /* Some network takes no runs, or there is something wrong with the first alone. */
        if (errno == EIO || errno == EOPNOTSUPP)
            self->runs = -1;
        PyErr_Clear();
        count = make_headers(self, parts, lengths, 0);
        taken = pass(self, descriptor, count, deadline, 0);
    }
    int sent = 0;
    for (int i = 0; i < taken; i++)
        sent += (int)self->headers[i].msg_hdr.msg_iovlen;
    return taken < 0 ? -1 : sent;
}

static PyObject *send_all(Batches *self, PyObject *args)
{
    int descriptor;
    PyObject *given, *timeout;
    double deadline;
    socklen_t lengths[MOST];
    if (!PyArg_ParseTuple(args, "iOO", &descriptor, &given, &timeout))
        return NULL;
    PyObject *items = PySequence_Fast(given, "datagrams are a sequence of (payload, address)");
    Py_buffer *views = items == NULL ? NULL : PyMem_New(Py_buffer, self->limit);
    if (views == NULL || begin(self, timeout, &deadline) < 0) {
        PyMem_Free(views);
        Py_XDECREF(items);
        return NULL;
    }
    Py_ssize_t sent = 0;
    int has_failed = 0, is_over = 0;
    while (!has_failed && !is_over && sent < PySequence_Fast_GET_SIZE(items)) {
        unsigned count = 0;
        while (count < self->limit && sent + count < PySequence_Fast_GET_SIZE(items)) {
            PyObject *item = PySequence_Fast_GET_ITEM(items, sent + count);
            if (!PyTuple_Check(item) || PyTuple_GET_SIZE(item) != 2) {
                PyErr_SetString(PyExc_TypeError, "a datagram is (payload, address)");
                has_failed = 1;
                break;
            }
            PyObject *name = PyTuple_GET_ITEM(item, 1);
            const Peer *peer = name == Py_None ? NULL : known_address(self, name);
            if ((name != Py_None && peer == NULL) ||
                PyObject_GetBuffer(PyTuple_GET_ITEM(item, 0), &views[count], PyBUF_SIMPLE) < 0) {
                has_failed = 1;
                break;
            }
            if (peer != NULL)
                self->addresses[count] = peer->address;
            lengths[count] = peer == NULL ? 0 : peer->length;
            self->parts[count] = (struct iovec){views[count].buf, (size_t)views[count].len};
            count++;
        }
        int taken = has_failed ? 0 : send_parts(self, descriptor, count, lengths, deadline);
        for (unsigned i = 0; i < count; i++)
            PyBuffer_Release(&views[i]);
        has_failed |= taken < 0;
        is_over = taken <= 0;
        sent += taken > 0 ? taken : 0;
    }
    self->is_busy = 0;
    PyMem_Free(views);
    Py_DECREF(items);
    /* What is wrong with one is said of it when it is the first. */
    if (has_failed && sent > 0 && PyErr_ExceptionMatches(PyExc_OSError))
        PyErr_Clear();
    else if (has_failed)
        return NULL;
    return PyLong_FromSsize_t(sent);
}

static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    unsigned limit;
    Py_ssize_t size;
    if (kwargs != NULL || !PyArg_ParseTuple(args, "In", &limit, &size))
        return PyErr_Format(PyExc_TypeError, "Batches(limit, size)");
    if (limit < 1 || limit > MOST || size < 1 || size > 1 << 20)
        return PyErr_Format(PyExc_ValueError, "a batch of up to %d, each of up to 1 MiB", MOST);
    Batches *self = (Batches *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->limit = limit;
    self->size = (size_t)size;
    self->headers = PyMem_Calloc(limit, sizeof *self->headers);
    self->parts = PyMem_Calloc(limit, sizeof *self->parts);
    self->addresses = PyMem_Calloc(limit, sizeof *self->addresses);
    self->controls = PyMem_Calloc(limit, sizeof *self->controls);
    void *room = mmap(NULL, limit * self->size, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    self->room = room == MAP_FAILED ? NULL : room;
    if (!self->headers || !self->parts || !self->addresses || !self->controls || !self->room) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static void dispose(Batches *self)
{
    PyTypeObject *type = Py_TYPE(self);
    for (int i = 0; i < KNOWN; i++) {
        Py_CLEAR(self->heard[i].name);
        Py_CLEAR(self->told[i].name);
    }
    if (self->room != NULL)
        munmap(self->room, self->limit * self->size);
    PyMem_Free(self->headers);
    PyMem_Free(self->parts);
    PyMem_Free(self->addresses);
    PyMem_Free(self->controls);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef batches_methods[] = {
    {"receive", (PyCFunction)receive, METH_VARARGS, "receive(fd, limit, timeout) -> (whole, cut)"},
    {"send", (PyCFunction)send_all, METH_VARARGS, "send(fd, datagrams, timeout) -> int"},
    {NULL, NULL, 0, NULL}};

static PyMemberDef batches_members[] = {
    {"dropped", T_ULONGLONG, offsetof(Batches, dropped), READONLY, "by the kernel, for want of room"},
    {NULL}};

static PyType_Slot batches_slots[] = {{Py_tp_new, make},
                                      {Py_tp_dealloc, dispose},
                                      {Py_tp_methods, batches_methods},
                                      {Py_tp_members, batches_members},
                                      {0, NULL}};

static PyType_Spec batches_spec = {.name = "penstock.protocols._datagrams.Batches",
                                   .basicsize = sizeof(Batches),
                                   .flags = Py_TPFLAGS_DEFAULT,
                                   .slots = batches_slots};

static int execute(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&batches_spec);
    if (type == NULL)
        return -1;
    int result = PyModule_AddObjectRef(module, "Batches", type);
    Py_DECREF(type);
    return result < 0 ? -1 : PyModule_AddIntConstant(module, "SO_RXQ_OVFL", SO_RXQ_OVFL);
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, execute}, {0, NULL}};

static struct PyModuleDef module_def = {PyModuleDef_HEAD_INIT, .m_name = "_datagrams",
                                        .m_slots = module_slots};

PyMODINIT_FUNC PyInit__datagrams(void) { return PyModuleDef_Init(&module_def); }
