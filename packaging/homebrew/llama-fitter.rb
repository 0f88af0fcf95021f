# Written by tools/release from pyproject.toml.
class LlamaFitter < Formula
  include Language::Python::Virtualenv

  desc "Find the llama.cpp parameters that run a GGUF model fastest in your memory"
  homepage "https://OWNER.github.io/llama-fitter/"
  url "https://files.pythonhosted.org/packages/26/9b/eeeb5f62f04899b89dca5bcfa60b5b50b7b5b2150527fadbb3b407e1a8d6/llama_fitter-0.1.0.tar.gz"
  sha256 "d9ce3f8f33e6a2b354d2a98b95e4e3158f666f446c2dcd3b1f71dbd214b9ca0d"
  license "MIT"

  depends_on "cmake" => :build
  depends_on "ninja" => :build
  depends_on "cffi"
  depends_on "numpy"
  depends_on "python@3.13"

  resource "click" do
    url "https://files.pythonhosted.org/packages/45/37/edbf1b0707709013c0cf2e8317e03d97ed29bf4cac709fe328904ae92a38/click-8.5.1.tar.gz"
    sha256 "9bbfada76703fd1d784b83eea012e3e8c6a001a876543ef104fa56aaaeb072b4"
  end

  resource "markdown-it-py" do
    url "https://files.pythonhosted.org/packages/16/fc/cee2c45553c9a9bf77d8b0c391560c556d7ed756b1f0bb35eb5d48db09ea/markdown_it_py-4.3.0.tar.gz"
    sha256 "91a58fa5b72c71a40cf7177250fd767480d7a2bb3ac426ccfb76fb90305fdaaa"
  end

  resource "mdurl" do
    url "https://files.pythonhosted.org/packages/d6/54/cfe61301667036ec958cb99bd3efefba235e65cdeb9c84d24a8293ba1d90/mdurl-0.1.2.tar.gz"
    sha256 "bb413d29f5eea38f31dd4754dd7377d4465116fb207585f97bf925588687c1ba"
  end

  resource "platformdirs" do
    url "https://files.pythonhosted.org/packages/71/18/0b0d99f5bf164f04a7a9534c3dbdbe4d5fd2b382667685ad40c192c4d3d1/platformdirs-4.14.8.tar.gz"
    sha256 "96893d686e84e9e6f358a9ea41a8de544df66dbf2ba6cda250e7dc73acf85b9b"
  end

  resource "psutil" do
    url "https://files.pythonhosted.org/packages/aa/c6/d1ddf4abb55e93cebc4f2ed8b5d6dbad109ecb8d63748dd2b20ab5e57ebe/psutil-7.2.2.tar.gz"
    sha256 "0746f5f8d406af344fd547f1c8daa5f5c33dbc293bb8d6a16d80b4bb88f59372"
  end

  resource "pygments" do
    url "https://files.pythonhosted.org/packages/49/2e/ced460408999b33da6b31b0021b0f37d329e202d4169aeb164493778f25b/pygments-2.21.0.tar.gz"
    sha256 "610ca751c9bc2492b38eb9a38a7fbc93edbbb2d7182edaf34e66ae493dee5c8c"
  end

  resource "rich" do
    url "https://files.pythonhosted.org/packages/c0/8f/0722ca900cc807c13a6a0c696dacf35430f72e0ec571c4275d2371fca3e9/rich-15.0.0.tar.gz"
    sha256 "edd07a4824c6b40189fb7ac9bc4c52536e9780fbbfbddf6f1e2502c31b068c36"
  end

  resource "tomli-w" do
    url "https://files.pythonhosted.org/packages/19/75/241269d1da26b624c0d5e110e8149093c759b7a286138f4efd61a60e75fe/tomli_w-1.2.0.tar.gz"
    sha256 "2dd14fac5a47c27be9cd4c976af5a12d87fb1f0b4512f81d69cce3b35ae25021"
  end

  # llama.cpp: what fitter is compiled against.
  resource "pinned" do
    url "https://files.pythonhosted.org/packages/ec/e9/e7de2b0463ea3ffbf0ede6cb21b58c1258a8f6521aae45ca773a59fe7cf3/llama_cpp_python-0.3.36.tar.gz"
    sha256 "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
  end

  # llama.cpp: what fitter plans with where there is no other.
  resource "bundled" do
    url "https://files.pythonhosted.org/packages/87/62/b6dfaaf346d3d4fd0e2a2df755f2693b77673f2735da7ba0592af9d2f09e/xllamacpp-2026.10.11549.tar.gz"
    sha256 "c17ee1163006f70726abb9f72137830818f3d8cb60bfc34cb232d08428eaa22b"
  end

  def install
    resource("pinned").stage buildpath/"pinned"
    resource("bundled").stage buildpath/"bundled"
    ENV["LLAMA_CPP_SOURCE_DIR"] = buildpath/"pinned/vendor/llama.cpp"
    bundled = buildpath/"bundled/thirdparty/llama.cpp"
    ENV["CMAKE_ARGS"] = "-DFITTER_BUNDLE_LLAMA=ON -DFITTER_BUNDLE_SOURCE_DIR=#{bundled}"
    virtualenv_install_with_resources without: %w[pinned bundled]
  end

  test do
    assert_match "-ngl 33", shell_output("#{bin}/fitter --shape llama-3.1-8b --gpu rtx-4090")
  end
end
