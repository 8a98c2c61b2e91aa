#include "compute.h"
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <atomic>
#include <vector>
using namespace onnxtrain; using std::vector;
namespace onnxtrain { namespace portable{extern const Compute kCompute;} namespace avx2{extern const Compute kCompute;} namespace avx512{extern const Compute kCompute;} }
static Parallel serial=[](int64_t n,const std::function<void(int64_t)>&w){for(int64_t i=0;i<n;++i)w(i);};
static Parallel two=[](int64_t n,const std::function<void(int64_t)>&w){ std::atomic<int64_t> next{0}; auto f=[&]{for(int64_t i;(i=next++)<n;)w(i);}; std::thread t(f); f(); t.join();};
static float rnd(){return rand()%2001/1000.0f-1;}
static double naive(const Convolution&c,vector<float>&x,vector<float>&w,vector<float>&y,vector<float>&dy,vector<float>&dw,vector<float>&dx){
 int64_t IC=c.groups*c.in_channels,OC=c.groups*c.out_channels; std::fill(y.begin(),y.end(),0);std::fill(dw.begin(),dw.end(),0);std::fill(dx.begin(),dx.end(),0);
 for(int n=0;n<c.batch;++n)for(int o=0;o<OC;++o)for(int i=0;i<c.in_channels;++i){int g=o/c.out_channels;
 for(int z=0;z<c.out[0];++z)for(int yy=0;yy<c.out[1];++yy)for(int xx=0;xx<c.out[2];++xx)
 for(int a=0;a<c.kernel[0];++a)for(int b=0;b<c.kernel[1];++b)for(int d=0;d<c.kernel[2];++d){
  int64_t iz=z*c.stride[0]+a*c.dilation[0]-c.pad[0],iy=yy*c.stride[1]+b*c.dilation[1]-c.pad[1],ix=xx*c.stride[2]+d*c.dilation[2]-c.pad[2];
  if(iz<0||iz>=c.in[0]||iy<0||iy>=c.in[1]||ix<0||ix>=c.in[2])continue;
  int64_t xi=((n*IC+g*c.in_channels+i)*c.in_size())+(iz*c.in[1]+iy)*c.in[2]+ix, wi=(o*c.in_channels+i)*c.taps()+(a*c.kernel[1]+b)*c.kernel[2]+d, yi=(n*OC+o)*c.out_size()+(z*c.out[1]+yy)*c.out[2]+xx;
  y[yi]+=x[xi]*w[wi]; dw[wi]+=x[xi]*dy[yi]; dx[xi]+=w[wi]*dy[yi]; } } return 0; }
static double diff(vector<float>&a,vector<float>&b){double m=0,s=1e-9;for(size_t i=0;i<a.size();++i){m=std::max(m,(double)std::abs(a[i]-b[i]));s=std::max(s,(double)std::abs(b[i]));}return m/s;}
int main(int argc,char**){
 const Compute* all[]={&portable::kCompute,&avx2::kCompute,&avx512::kCompute};
 if(argc>1){ struct S{int b,ci,co,h,k,s;}; for(S s:{S{16,64,64,32,3,1},S{16,128,128,16,3,1},S{16,256,256,8,3,1},S{16,512,512,4,3,1},S{16,64,128,32,3,2},S{16,64,128,32,1,2},S{16,96,576,14,1,1}}){
  Convolution c{s.b,1,s.ci,s.co,{1,s.h,s.h},{1,(s.h+s.s-1)/s.s,(s.h+s.s-1)/s.s},{1,s.k,s.k},{1,s.s,s.s},{1,1,1},{0,s.k/2,s.k/2}};
  vector<float> x(s.b*s.ci*c.in_size()),w(s.co*s.ci*c.taps()),y(s.b*s.co*c.out_size()),dy(y.size()),dw(w.size()),dx(x.size()); for(auto&v:x)v=rnd();for(auto&v:w)v=rnd();for(auto&v:dy)v=rnd();
  double fl=2.0*s.b*s.co*c.out_size()*s.ci*c.taps(); 
  for(auto*t:{all[1],all[2]}) for (auto&par:{serial,two}) { double best[3]={1e9,1e9,1e9}; for(int r=0;r<5;++r)for(int q=0;q<3;++q){auto b=std::chrono::steady_clock::now(); if(q==0)t->convolve(c,x.data(),w.data(),nullptr,y.data(),par); if(q==1)t->convolve_weight_gradient(c,x.data(),dy.data(),dw.data(),par); if(q==2)t->convolve_input_gradient(c,dy.data(),w.data(),dx.data(),par); best[q]=std::min(best[q],std::chrono::duration<double>(std::chrono::steady_clock::now()-b).count());}
  printf("%s %s b%d %d->%d %d k%d s%d: fwd %.0f dw %.0f dx %.0f\n",t->name,&par==&serial?"1":"?",s.b,s.ci,s.co,s.h,s.k,s.s,fl/best[0]/1e9,fl/best[1]/1e9,fl/best[2]/1e9);} } return 0; }
 double worst=0; for(int t=0;t<300;++t){ Convolution c{}; c.batch=1+rand()%3;c.groups=1+rand()%2;c.in_channels=1+rand()%5;c.out_channels=1+rand()%20; bool ok=true;
  for(int a=0;a<3;++a){ int one=a<rand()%3; c.kernel[a]=one?1:1+rand()%3; c.stride[a]=one?1:1+rand()%3;c.dilation[a]=one?1:1+rand()%2; c.pad[a]=one?0:rand()%3; c.in[a]=one?1:1+rand()%11; int64_t end=rand()%3; int64_t o=(c.in[a]+c.pad[a]+(one?0:end)-c.dilation[a]*(c.kernel[a]-1)-1); if(o<0)ok=false; c.out[a]=o/c.stride[a]+1; } if(!ok)continue;
  int64_t IC=c.groups*c.in_channels,OC=c.groups*c.out_channels; vector<float> x(c.batch*IC*c.in_size()),w(OC*c.in_channels*c.taps()),y(c.batch*OC*c.out_size()),dy(y.size()),dw(w.size()),dx(x.size()),y2(y),dw2(dw),dx2(dx); for(auto&v:x)v=rnd();for(auto&v:w)v=rnd();for(auto&v:dy)v=rnd();
  naive(c,x,w,y,dy,dw,dx); for(auto*k:all){ std::fill(y2.begin(),y2.end(),7);std::fill(dw2.begin(),dw2.end(),7);std::fill(dx2.begin(),dx2.end(),7); k->convolve(c,x.data(),w.data(),nullptr,y2.data(),two);k->convolve_weight_gradient(c,x.data(),dy.data(),dw2.data(),two);k->convolve_input_gradient(c,dy.data(),w.data(),dx2.data(),two); double d=std::max({diff(y2,y),diff(dw2,dw),diff(dx2,dx)}); if(d>1e-5)printf("case %d %s %g %g %g\n",t,k->name,diff(y2,y),diff(dw2,dw),diff(dx2,dx)); worst=std::max(worst,d);} }
 printf("worst %g\n",worst); }
