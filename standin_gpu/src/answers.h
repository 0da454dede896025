// What a kernel that was launched would have written, where a program's next step may depend on it.
#pragma once

namespace standin {
// `mangled`: the kernel's name in the binary; `arguments`: pointers to its parameters, as cudaLaunchKernel gets them.
void answer_launch(const char* mangled, void** arguments);
}
