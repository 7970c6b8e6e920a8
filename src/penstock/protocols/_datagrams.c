/* How do many datagrams pass in one call of the system?
 *
 * By recvmmsg and sendmmsg. Whole datagrams come as (payload, address); what was cut comes apart
 * from them, and what the kernel dropped is counted. The kernel has room for few: so who takes them
 * may be assisted by another thread, which pulls them from there, without Python, while it is busy.
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
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 1024, KNOWN = 256 };

/* Seconds without a datagram after which the next one is not expected at once. */
#define LULL 0.02

/* Datagrams of one size to one peer, one behind the other, pass through the kernel as one that it
 * cuts at the end: a run. Its datagrams fit the packets of every network. */
enum { LONGEST_RUN = 64, LARGEST_IN_RUN = 1200, LARGEST_RUN = 65000 };
#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif

/* What the kernel tells of a socket's memory (sock_diag(7)): words, of which one counts drops. */
#ifndef SO_MEMINFO
#define SO_MEMINFO 55
#endif
enum { MEMINFO_DROPS = 8, MEMINFO_MOST = 32 };

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

/* A datagram that waits to be taken: who sent it, its true size, and how much of it is kept where. */
typedef struct {
    socklen_t length;
    Address address;
    size_t size, kept, at;
} Entry;

/* Those that came by one call of the system. Their bytes are behind the entries. */
typedef struct Block {
    struct Block *next;
    unsigned count, taken;
    Entry entries[];
} Block;

typedef struct {
    PyObject_HEAD
    unsigned limit;
    size_t size;          /* bytes of one datagram, at most */
    char *room;           /* `limit` of them; pages that nothing came to take no memory */
    struct mmsghdr *headers;
    struct iovec *parts;  /* two for each: a datagram may have a head */
    Address *addresses;
    Control *controls;
    Peer heard[KNOWN], told[KNOWN];
    uint32_t overflow;    /* the kernel's count, which wraps */
    unsigned long long dropped;
    unsigned long long whole, cut; /* datagrams that came from the kernel */
    unsigned long long bytes;      /* of whole ones, or of those that went */
    char runs;            /* whether the kernel knows runs: 1, or -1 if not; 0: nobody asked */
    char is_busy;         /* one thread at a time: the arrays are in the hands of the kernel */
    pthread_mutex_t lock; /* for the arrays and what follows: two threads may pull and take */
    pthread_cond_t pulled;
    Block *first, *last;
    Py_ssize_t waiting;   /* datagrams, and the bytes that they take */
    size_t waiting_bytes;
    double active;        /* when something came last */
    int bell;             /* for who polls when another thread has pulled */
    char is_polled, is_asleep;
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

/* Take over the kernel's count. It wraps, and that of a datagram is as old as the datagram. */
static void note_overflow(Batches *self, uint32_t count)
{
    if ((int32_t)(count - self->overflow) <= 0)
        return;
    self->dropped += (uint32_t)(count - self->overflow);
    self->overflow = count;
}

static void note_dropped(Batches *self, struct msghdr *header)
{
    for (struct cmsghdr *each = CMSG_FIRSTHDR(header); each; each = CMSG_NXTHDR(header, each))
        if (each->cmsg_level == SOL_SOCKET && each->cmsg_type == SO_RXQ_OVFL) {
            uint32_t count;
            memcpy(&count, CMSG_DATA(each), sizeof count);
            note_overflow(self, count);
        }
}

/* Ask for the kernel's count: otherwise it comes with the next datagram, and there may be none. */
static PyObject *ask_dropped(Batches *self, PyObject *args)
{
    int descriptor;
    uint32_t words[MEMINFO_MOST];
    socklen_t length = sizeof words;
    if (!PyArg_ParseTuple(args, "i", &descriptor))
        return NULL;
    if (getsockopt(descriptor, SOL_SOCKET, SO_MEMINFO, words, &length) == 0 &&
        length > MEMINFO_DROPS * sizeof *words) {
        pthread_mutex_lock(&self->lock); /* for who holds it without the GIL, and never waits for that */
        note_overflow(self, words[MEMINFO_DROPS]);
        pthread_mutex_unlock(&self->lock);
    }
    Py_RETURN_NONE;
}

static void note_received(Batches *self, size_t size, int is_cut)
{
    self->whole += !is_cut;
    self->cut += is_cut != 0;
    self->bytes += is_cut ? 0 : size;
}

static int add(PyObject *list, PyObject *item)
{
    int result = item == NULL ? -1 : PyList_Append(list, item);
    Py_XDECREF(item);
    return result;
}

/* Let the kernel put the first so many datagrams into the room again, each at its place. */
static void make_room(Batches *self, unsigned limit)
{
    for (unsigned i = 0; i < limit; i++) {
        self->parts[i] = (struct iovec){self->room + i * self->size, self->size};
        self->headers[i].msg_hdr = (struct msghdr){
            .msg_name = &self->addresses[i], .msg_namelen = sizeof(Address),
            .msg_iov = &self->parts[i], .msg_iovlen = 1,
            .msg_control = &self->controls[i], .msg_controllen = sizeof(Control)};
    }
}

/* Add a datagram to those that came whole, or to those that were cut; -1 for an error. */
static int add_datagram(Batches *self, PyObject *whole, PyObject *cut, const char *data, size_t size,
                        const Address *address, socklen_t address_length, int is_cut)
{
    PyObject *name = known_name(self, address, address_length);
    PyObject *payload = name == NULL ? NULL : PyBytes_FromStringAndSize(
        data, (Py_ssize_t)(size > self->size ? self->size : size));
    PyObject *item = payload == NULL ? NULL
                     : is_cut ? Py_BuildValue("(OOn)", payload, name, (Py_ssize_t)size)
                              : PyTuple_Pack(2, payload, name);
    Py_XDECREF(payload);
    Py_XDECREF(name);
    return add(is_cut ? cut : whole, item);
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
    int count = pass(self, descriptor, limit, deadline, 1);
    PyObject *whole = count < 0 ? NULL : PyList_New(0);
    PyObject *cut = whole == NULL ? NULL : PyList_New(0);
    for (int i = 0; cut != NULL && i < count; i++) {
        struct msghdr *header = &self->headers[i].msg_hdr;
        size_t length = self->headers[i].msg_len; /* of the datagram, also if it did not fit */
        int is_cut = (header->msg_flags & MSG_TRUNC) != 0 || length > self->size;
        note_dropped(self, header);
        note_received(self, length, is_cut);
        if (add_datagram(self, whole, cut, self->parts[i].iov_base, length, &self->addresses[i],
                         header->msg_namelen, is_cut) < 0)
            Py_CLEAR(cut);
    }
    make_room(self, count < 0 ? 0 : (unsigned)count);
    self->is_busy = 0;
    PyObject *result = cut == NULL ? NULL : PyTuple_Pack(2, whole, cut);
    Py_XDECREF(whole);
    Py_XDECREF(cut);
    return result;
}

/* Copy what the kernel put into the room; NULL: there is no memory for it. */
static Block *make_block(Batches *self, unsigned count, size_t *bytes)
{
    *bytes = count * sizeof(Entry);
    for (unsigned i = 0; i < count; i++)
        *bytes += self->headers[i].msg_len > self->size ? self->size : self->headers[i].msg_len;
    Block *block = malloc(sizeof(Block) + *bytes);
    if (block == NULL)
        return NULL;
    *block = (Block){.count = count};
    size_t at = sizeof(Block) + count * sizeof(Entry);
    for (unsigned i = 0; i < count; i++) {
        struct msghdr *header = &self->headers[i].msg_hdr;
        size_t size = self->headers[i].msg_len, kept = size > self->size ? self->size : size;
        if ((header->msg_flags & MSG_TRUNC) != 0 && size <= self->size)
            size = self->size + 1; /* a kernel that does not tell the true size */
        note_received(self, size, size > self->size);
        block->entries[i] = (Entry){.length = header->msg_namelen, .address = self->addresses[i],
                                    .size = size, .kept = kept, .at = at};
        memcpy((char *)block + at, self->parts[i].iov_base, kept);
        at += kept;
    }
    return block;
}

/* Take all from the kernel that has come, up to about so many bytes that wait; an errno, or 0. */
static int pull(Batches *self, int descriptor, size_t most)
{
    int count = (int)self->limit;
    while (count == (int)self->limit && self->waiting_bytes <= most) {
        count = recvmmsg(descriptor, self->headers, self->limit, MSG_DONTWAIT | MSG_TRUNC, NULL);
        if (count < 0)
            return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? 0 : errno;
        for (int i = 0; i < count; i++)
            note_dropped(self, &self->headers[i].msg_hdr);
        size_t bytes = 0;
        Block *block = count == 0 ? NULL : make_block(self, (unsigned)count, &bytes);
        if (block == NULL) {
            self->dropped += (unsigned)count;
            return count == 0 ? 0 : ENOMEM;
        }
        *(self->first == NULL ? &self->first : &self->last->next) = block;
        self->last = block;
        self->waiting += count;
        self->waiting_bytes += bytes;
        self->active = now();
        make_room(self, (unsigned)count);
    }
    return 0;
}

static void nap(Batches *self, double until)
{
    struct timespec end = {.tv_sec = (time_t)until};
    end.tv_nsec = (long)((until - (double)end.tv_sec) * 1e9);
    pthread_cond_timedwait(&self->pulled, &self->lock, &end);
}

static PyObject *failure(int reason)
{
    errno = reason;
    return PyErr_SetFromErrno(PyExc_OSError);
}

/* For so many seconds, see that the kernel's room does not fill while another thread is busy with
 * what it took. It is looked at now and then: who is woken for each datagram costs more than it
 * takes. While nothing comes, this sleeps until the other thread has something. */
static PyObject *assist(Batches *self, PyObject *args)
{
    int descriptor, reason = 0;
    Py_ssize_t most;
    double between, seconds;
    if (!PyArg_ParseTuple(args, "indd", &descriptor, &most, &between, &seconds))
        return NULL;
    struct timespec pause = {.tv_nsec = (long)(between * 1e9)};
    Py_BEGIN_ALLOW_THREADS
    double deadline = now() + seconds, moment;
    pthread_mutex_lock(&self->lock);
    while (!reason && (moment = now()) < deadline) {
        if (self->first == NULL && moment > self->active + LULL) {
            self->is_asleep = 1;
            nap(self, deadline);
            self->is_asleep = 0;
            continue;
        }
        pthread_mutex_unlock(&self->lock);
        nanosleep(&pause, NULL);
        pthread_mutex_lock(&self->lock);
        reason = pull(self, descriptor, (size_t)most);
        if (self->is_polled && self->first != NULL)
            eventfd_write(self->bell, 1);
    }
    pthread_mutex_unlock(&self->lock);
    Py_END_ALLOW_THREADS
    return reason ? failure(reason) : Py_NewRef(Py_None);
}

/* Wait for datagrams, so long; an errno, or 0. */
static int await_first(Batches *self, int descriptor, size_t most, double seconds)
{
    double deadline = now() + seconds;
    pthread_mutex_lock(&self->lock);
    int reason = pull(self, descriptor, most);
    while (!reason && self->first == NULL && now() < deadline) {
        struct pollfd both[] = {{.fd = descriptor, .events = POLLIN}, {.fd = self->bell, .events = POLLIN}};
        eventfd_t rung;
        self->is_polled = 1;
        pthread_mutex_unlock(&self->lock);
        int ready = poll(both, 2, (int)ceil((deadline - now()) * 1e3));
        reason = ready < 0 && errno != EINTR ? errno : 0;
        pthread_mutex_lock(&self->lock);
        self->is_polled = 0;
        if (ready > 0 && both[1].revents)
            eventfd_read(self->bell, &rung);
        if (!reason)
            reason = pull(self, descriptor, most);
    }
    if (self->is_asleep && self->first != NULL)
        pthread_cond_signal(&self->pulled);
    pthread_mutex_unlock(&self->lock);
    return reason;
}

/* Return up to so many datagrams, of those that wait; wait so long for the first. */
static PyObject *take(Batches *self, PyObject *args)
{
    int descriptor, reason;
    unsigned limit;
    Py_ssize_t most;
    double seconds;
    if (!PyArg_ParseTuple(args, "iInd", &descriptor, &limit, &most, &seconds))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    reason = await_first(self, descriptor, (size_t)most, seconds);
    Py_END_ALLOW_THREADS
    if (reason)
        return failure(reason);
    PyObject *whole = PyList_New(0), *cut = PyList_New(0), *result = NULL;
    int failed = whole == NULL || cut == NULL;
    Block *block = self->first; /* nobody else removes one */
    while (!failed && limit > 0 && block != NULL) {
        size_t bytes = 0;
        Py_ssize_t count = 0;
        for (; !failed && limit > 0 && block->taken < block->count; limit--, count++) {
            Entry *entry = &block->entries[block->taken++];
            bytes += sizeof(Entry) + entry->kept;
            failed = add_datagram(self, whole, cut, (char *)block + entry->at, entry->size,
                                  &entry->address, entry->length, entry->size > self->size) < 0;
        }
        /* The other thread may have it for as long as a call of the system takes. */
        Py_BEGIN_ALLOW_THREADS
        pthread_mutex_lock(&self->lock);
        self->waiting -= count;
        self->waiting_bytes -= bytes;
        if (block->taken == block->count) {
            self->first = block->next;
            free(block);
        }
        block = self->first;
        pthread_mutex_unlock(&self->lock);
        Py_END_ALLOW_THREADS
    }
    if (!failed)
        result = PyTuple_Pack(2, whole, cut);
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

/* What is sent in one call: datagrams of one part, or of two. */
typedef struct {
    unsigned count, pieces;
    /* Of each address in the batch, 0: none; or NULL where all have that of `peer`, or none. */
    const socklen_t *lengths;
    const Peer *peer;
} Outgoing;

static size_t size_of(const Batches *self, const Outgoing *out, unsigned index)
{
    size_t size = 0;
    for (unsigned i = index * out->pieces; i < (index + 1) * out->pieces; i++)
        size += self->parts[i].iov_len;
    return size;
}

static int go_together(const Batches *self, const Outgoing *out, unsigned one, unsigned other)
{
    const socklen_t *lengths = out->lengths;
    return lengths == NULL ||
           (lengths[one] && lengths[other] == lengths[one] &&
            memcmp(&self->addresses[other], &self->addresses[one], lengths[one]) == 0);
}

/* Make headers of the datagrams; return how many. */
static unsigned make_headers(Batches *self, const Outgoing *out, int in_runs)
{
    unsigned count = 0;
    for (unsigned first = 0, end; first < out->count; first = end) {
        size_t size = size_of(self, out, first);
        end = first + 1;
        if (in_runs && 0 < size && size <= LARGEST_IN_RUN)
            while (end < out->count && end - first < LONGEST_RUN &&
                   (end - first + 1) * size <= LARGEST_RUN && size_of(self, out, end) == size &&
                   go_together(self, out, first, end))
                end++;
        struct msghdr *header = &self->headers[count].msg_hdr;
        *header = (struct msghdr){.msg_iov = &self->parts[first * out->pieces],
                                  .msg_iovlen = (end - first) * out->pieces};
        if (out->lengths != NULL && out->lengths[first]) {
            header->msg_name = &self->addresses[first];
            header->msg_namelen = out->lengths[first];
        } else if (out->peer != NULL) {
            header->msg_name = (void *)&out->peer->address;
            header->msg_namelen = out->peer->length;
        }
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

/* Send datagrams; return how many the kernel took, or -1 for an error. */
static int send_parts(Batches *self, int descriptor, const Outgoing *out, double deadline)
{
    int in_runs = knows_runs(self, descriptor);
    unsigned count = make_headers(self, out, in_runs);
    int taken = pass(self, descriptor, count, deadline, 0);
    if (taken < 0 && self->headers[0].msg_hdr.msg_iovlen > out->pieces &&
        (errno == EIO || errno == EINVAL || errno == EMSGSIZE || errno == EOPNOTSUPP)) {
        /* Some network takes no runs, or there is something wrong with the first alone. */
        if (errno == EIO || errno == EOPNOTSUPP)
            self->runs = -1;
        PyErr_Clear();
        count = make_headers(self, out, 0);
        taken = pass(self, descriptor, count, deadline, 0);
    }
    int sent = 0;
    for (int i = 0; i < taken; i++)
        sent += (int)(self->headers[i].msg_hdr.msg_iovlen / out->pieces);
    for (int i = 0; i < sent; i++)
        self->bytes += size_of(self, out, (unsigned)i);
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
        Outgoing out = {.count = count, .pieces = 1, .lengths = lengths};
        int taken = has_failed ? 0 : send_parts(self, descriptor, &out, deadline);
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

/* Send datagrams that are rows of two columns: a head of a fixed size, and what follows it. */
static PyObject *send_columns(Batches *self, PyObject *args)
{
    int descriptor;
    Py_buffer heads, offsets, data;
    Py_ssize_t head, count;
    PyObject *name, *timeout;
    double deadline;
    if (!PyArg_ParseTuple(args, "iy*ny*y*nOO", &descriptor, &heads, &head, &offsets, &data, &count,
                          &name, &timeout))
        return NULL;
    const int32_t *places = offsets.buf;
    const Peer *peer = NULL;
    int fits = head >= 0 && count >= 0 && heads.len >= count * head &&
               offsets.len / (Py_ssize_t)sizeof *places > count;
    for (Py_ssize_t i = 0; fits && i < count; i++)
        fits = places[i] >= 0 && places[i] <= places[i + 1] && places[i + 1] <= data.len;
    if (!fits)
        PyErr_SetString(PyExc_ValueError, "columns that do not fit together");
    else if (name != Py_None)
        peer = known_address(self, name);
    Py_ssize_t sent = 0;
    int has_failed = PyErr_Occurred() != NULL || begin(self, timeout, &deadline) < 0;
    int has_begun = !has_failed, is_over = 0;
    while (!has_failed && !is_over && sent < count) {
        Outgoing out = {.pieces = 2, .peer = peer};
        for (Py_ssize_t row = sent; row < count && out.count < self->limit; row++, out.count++) {
            self->parts[2 * out.count] = (struct iovec){(char *)heads.buf + row * head, (size_t)head};
            self->parts[2 * out.count + 1] = (struct iovec){
                (char *)data.buf + places[row], (size_t)(places[row + 1] - places[row])};
        }
        int taken = send_parts(self, descriptor, &out, deadline);
        has_failed = taken < 0;
        is_over = taken <= 0;
        sent += taken > 0 ? taken : 0;
    }
    if (has_begun)
        self->is_busy = 0;
    PyBuffer_Release(&heads);
    PyBuffer_Release(&offsets);
    PyBuffer_Release(&data);
    /* As above. */
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
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&self->pulled, &clock);
    pthread_condattr_destroy(&clock);
    pthread_mutex_init(&self->lock, NULL);
    self->bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    self->headers = PyMem_Calloc(limit, sizeof *self->headers);
    self->parts = PyMem_Calloc(2 * (size_t)limit, sizeof *self->parts);
    self->addresses = PyMem_Calloc(limit, sizeof *self->addresses);
    self->controls = PyMem_Calloc(limit, sizeof *self->controls);
    void *room = mmap(NULL, limit * self->size, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    self->room = room == MAP_FAILED ? NULL : room;
    if (self->bell < 0) {
        Py_DECREF(self);
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    if (!self->headers || !self->parts || !self->addresses || !self->controls || !self->room) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    make_room(self, limit);
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
    for (Block *block = self->first, *next; block != NULL; block = next) {
        next = block->next;
        free(block);
    }
    pthread_cond_destroy(&self->pulled);
    pthread_mutex_destroy(&self->lock);
    if (self->bell >= 0)
        close(self->bell);
    PyMem_Free(self->headers);
    PyMem_Free(self->parts);
    PyMem_Free(self->addresses);
    PyMem_Free(self->controls);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef batches_methods[] = {
    {"receive", (PyCFunction)receive, METH_VARARGS, "receive(fd, limit, timeout) -> (whole, cut)"},
    {"ask_dropped", (PyCFunction)ask_dropped, METH_VARARGS, "ask_dropped(fd): update `dropped`"},
    {"assist", (PyCFunction)assist, METH_VARARGS, "assist(fd, most_bytes, between, seconds)"},
    {"take", (PyCFunction)take, METH_VARARGS, "take(fd, limit, most_bytes, seconds) -> (whole, cut)"},
    {"send", (PyCFunction)send_all, METH_VARARGS, "send(fd, datagrams, timeout) -> int"},
    {"send_columns", (PyCFunction)send_columns, METH_VARARGS,
     "send_columns(fd, heads, head, offsets, data, count, address, timeout) -> int"},
    {NULL, NULL, 0, NULL}};

static PyMemberDef batches_members[] = {
    {"dropped", T_ULONGLONG, offsetof(Batches, dropped), READONLY, "by the kernel, for want of room"},
    {"whole", T_ULONGLONG, offsetof(Batches, whole), READONLY, "datagrams that came so"},
    {"cut", T_ULONGLONG, offsetof(Batches, cut), READONLY, "datagrams that came so"},
    {"bytes", T_ULONGLONG, offsetof(Batches, bytes), READONLY, "of whole datagrams that passed"},
    {"waiting", T_PYSSIZET, offsetof(Batches, waiting), READONLY, "to be taken"},
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
