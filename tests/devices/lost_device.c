/* A Vulkan driver that is SwiftShader until the file of LOST exists: then the device is lost. */
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef void (*Function)(void);
typedef Function (*Lookup)(void *, const char *);
typedef int (*Submit)(void *, unsigned, const void *, void *);
typedef int (*Negotiate)(unsigned *);

static Lookup of_instance, of_device;
static Submit submit;

static void *driver(void) {
    static void *found;
    return found ? found : (found = dlopen(getenv("DRIVER"), RTLD_NOW | RTLD_LOCAL));
}

static int lose(void *queue, unsigned count, const void *submits, void *fence) {
    return access(getenv("LOST"), F_OK) ? submit(queue, count, submits, fence) : -4;
}

static Function device_function(void *, const char *);

static Function wrapped(Function own, const char *name) {
    if (own && !strcmp(name, "vkQueueSubmit")) {
        submit = (Submit)own;
        return (Function)lose;
    }
    if (own && !strcmp(name, "vkGetDeviceProcAddr")) {
        of_device = (Lookup)own;
        return (Function)device_function;
    }
    return own;
}

static Function device_function(void *device, const char *name) {
    return wrapped(of_device(device, name), name);
}

Function vk_icdGetInstanceProcAddr(void *instance, const char *name) {
    if (!of_instance) of_instance = (Lookup)dlsym(driver(), "vk_icdGetInstanceProcAddr");
    return wrapped(of_instance(instance, name), name);
}

int vk_icdNegotiateLoaderICDInterfaceVersion(unsigned *version) {
    Negotiate own = (Negotiate)dlsym(driver(), "vk_icdNegotiateLoaderICDInterfaceVersion");
    return own(version);
}

Function vk_icdGetPhysicalDeviceProcAddr(void *instance, const char *name) {
    Lookup own = (Lookup)dlsym(driver(), "vk_icdGetPhysicalDeviceProcAddr");
    return own ? own(instance, name) : 0;
}
