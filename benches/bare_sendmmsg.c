/* How fast do datagrams leave a machine by sendmmsg alone?
 *
 *     bare_sendmmsg HOST PORT COUNT SIZE BATCH
 *
 * A yardstick, not an implementation: all datagrams are the same bytes, which are there beforehand.
 * It prints the seconds that it took.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <time.h>

enum { MOST = 1024, LARGEST = 65507 };

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

int main(int argc, char **argv)
{
    static char payload[LARGEST];
    static struct iovec parts[MOST];
    static struct mmsghdr headers[MOST];
    if (argc != 6)
        return 2;
    long count = atol(argv[3]), batch = atol(argv[5]);
    size_t size = (size_t)atol(argv[4]);
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(argv[2]))};
    int fd = socket(AF_INET, SOCK_DGRAM, 0);
    if (batch < 1 || batch > MOST || size > LARGEST || inet_pton(AF_INET, argv[1], &to.sin_addr) != 1 ||
        connect(fd, (struct sockaddr *)&to, sizeof to) < 0)
        return 2;
    for (long i = 0; i < batch; i++) {
        parts[i] = (struct iovec){payload, size};
        headers[i].msg_hdr = (struct msghdr){.msg_iov = &parts[i], .msg_iovlen = 1};
    }
    double began = now();
    for (long sent = 0; sent < count;) {
        long left = count - sent;
        int taken = sendmmsg(fd, headers, (unsigned)(left < batch ? left : batch), 0);
        if (taken < 0) {
            perror("sendmmsg");
            return 1;
        }
        sent += taken;
    }
    printf("%.9f\n", now() - began);
    return 0;
}
