/* Writes to files fail with EIO, as many of a hundred as the first eight bytes of the file $TROUBLES say. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static const volatile int64_t *troubles;
static uint64_t luck = 88172645463325252ULL;

__attribute__((constructor)) static void begin(void) {
    const char *name = getenv("TROUBLES");
    int fd = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0)
        return;
    void *found = mmap(NULL, 16, PROT_READ, MAP_SHARED, fd, 0);
    if (found != MAP_FAILED)
        troubles = found;
    close(fd);
}

static int fails(int fd) {
    struct stat about;
    if (!troubles || !*troubles || fstat(fd, &about) || !S_ISREG(about.st_mode))
        return 0;
    luck ^= luck << 13, luck ^= luck >> 7, luck ^= luck << 17;
    if ((int64_t)(luck % 100) >= *troubles)
        return 0;
    errno = EIO;
    return 1;
}

#define REAL(name) ((typeof(&name))dlsym(RTLD_NEXT, #name))

ssize_t write(int fd, const void *data, size_t length) { return fails(fd) ? -1 : REAL(write)(fd, data, length); }
ssize_t writev(int fd, const struct iovec *parts, int count) { return fails(fd) ? -1 : REAL(writev)(fd, parts, count); }
ssize_t pwrite(int fd, const void *data, size_t length, off_t at) { return fails(fd) ? -1 : REAL(pwrite)(fd, data, length, at); }
ssize_t pwrite64(int fd, const void *data, size_t length, off64_t at) { return fails(fd) ? -1 : REAL(pwrite64)(fd, data, length, at); }
int fsync(int fd) { return fails(fd) ? -1 : REAL(fsync)(fd); }
int fdatasync(int fd) { return fails(fd) ? -1 : REAL(fdatasync)(fd); }
